// A c10d store over MPI, by which the ranks of gloo and NCCL find each other. It opens no port and writes no file.
#pragma once

#include "base/export.hpp"
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

/// A request to the table of keys and values, which rank 0 keeps.
struct StoreRequest {
  enum class Kind : std::uint8_t { get, set, add, compare_set, erase, count };
  Kind kind = Kind::get;
  std::string key = {};
  Bytes value = {};     ///< for set and compare_set, the new value; for add, the number in decimal
  Bytes expected = {};  ///< for compare_set
};

/// Carries out a request on the table and returns the answer. For get and erase, returns nothing if there is no such
/// key. Numbers are in decimal, as in c10d's other stores.
std::optional<Bytes> handle(std::map<std::string, Bytes>& table, const StoreRequest& store_request);

/// Keys and values that the ranks of a communicator share.
///
/// Rank 0 keeps the table, and a thread there answers. A thread is needed because MPI makes no progress on a rank that
/// is busy elsewhere, and backends ask at any time from their own threads (NCCL at the first collective, gloo when it
/// makes a connection late). Every request is answered at once, if need be by "no such key". A rank that waits for a
/// key asks again and again, so no answer is owed to a rank that has given up. While nobody asks, the thread looks for
/// requests every 10 ms.
///
/// All ranks construct the store; then each rank may use it at any time, from any thread. It needs MPI_THREAD_MULTIPLE.
/// The table lives as long as rank 0's store or a clone of it, but not after close(). The store and its clones must be
/// destroyed before MPI is finalised. The destructor is local.
class MUSTER_INTERNAL_API MpiStore final : public c10d::Store {
 public:
  /// `communicator` must serve this store only.
  MpiStore(Communicator communicator, std::chrono::milliseconds timeout);

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::set;
  void set(const std::string& key, const Bytes& value) override;
  using c10d::Store::compareSet;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override;
  /// Waits until a rank has set the key; throws as wait() does.
  Bytes get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  /// Waits until all keys are set, for each key at most the timeout; past it, throws an Error (ExitCode::retry).
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  /// Ends rank 0's thread, also while clones of the store live. No rank may use the store afterwards. Local.
  void close();

 private:
  class Connection;
  MpiStore(std::shared_ptr<Connection> connection, std::chrono::milliseconds timeout);
  Bytes wait_for(const std::string& key, std::chrono::milliseconds timeout);

  std::shared_ptr<Connection> connection_;
};

}  // namespace muster::detail::group
