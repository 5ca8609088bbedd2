// What torch's own backends find each other by, over MPI: no port is opened and no file written.
#pragma once

#include "muster/communicator.hpp"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::group {

using Bytes = std::vector<std::uint8_t>;

/// What is asked of the table of keys.
struct Question {
  enum class Verb : std::uint8_t { get, set, add, compare_set, erase, count };
  Verb verb = Verb::get;
  std::string key = {};
  Bytes value = {};     ///< to set, or to compare and set; the number to add, in decimal
  Bytes expected = {};  ///< of compare_set
};

/// Carries it out. No answer where there is no such key; numbers are in decimal, as in c10d's other stores.
std::optional<Bytes> answer(std::map<std::string, Bytes>& table, const Question& question);

/// Keys and values that the ranks of a communicator share.
///
/// Rank 0 keeps the table, and a thread answers there: MPI makes no progress for a rank that is busy elsewhere, and a
/// backend asks when it likes, from threads of its own (NCCL at the first collective, gloo for a connection that it
/// makes late). Every question is answered at once, also by "not there": who waits for a key asks again, so nothing is
/// owed to a rank that gave up. The thread naps while nobody asks.
///
/// Made collectively; then each rank uses it as it likes, from any thread. It needs MPI_THREAD_MULTIPLE. The table
/// lives as long as rank 0's store or a clone of it, which must be gone before MPI is finalised; its destructor is
/// local.
class Store final : public c10d::Store {
 public:
  /// `communicator` is for this store alone.
  Store(Communicator communicator, std::chrono::milliseconds timeout);

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::set;
  void set(const std::string& key, const Bytes& value) override;
  using c10d::Store::compareSet;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override;
  /// Waits for the key.
  Bytes get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  /// An Error (ExitCode::retry) past the time-out.
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  class Link;
  Store(std::shared_ptr<Link> link, std::chrono::milliseconds timeout);
  Bytes wait_for(const std::string& key, std::chrono::milliseconds timeout);

  std::shared_ptr<Link> link_;
};

}  // namespace muster::detail::group
