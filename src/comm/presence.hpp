// Finds out by messages which ranks wait in an agreement, once the agreement takes too long.
#pragma once

#include "comm/pool.hpp"

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace muster::detail::comm {

/// Asks ranks whether they wait in an agreement, and answers for this one. Thread-safe. Agreements have numbers, which
/// grow from one to the next.
class Presence {
 public:
  /// Messages go over `comm`, with a tag of their own.
  explicit Presence(const PooledCommunicator& comm) : comm_(comm) {}
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

  /// Asks the ranks that this rank has not asked yet whether they wait in that agreement. They answer once they do.
  void ask(const std::vector<int>& ranks, std::int64_t agreement);
  /// Receives the messages that have come. `agreement`: the agreement in which this rank waits, about which it answers
  /// questions; 0 if it waits in none.
  void poll(std::int64_t agreement);
  /// True if the rank has answered that it waits in that agreement.
  bool has_answered(int rank, std::int64_t agreement) const;

 private:
  /// A question or an answer.
  struct Note {
    std::int64_t agreement = 0;
    std::int64_t is_answer = 0;
  };
  void send(int rank, Note note);

  const PooledCommunicator& comm_;
  mutable std::mutex mutex_;
  std::map<int, std::int64_t> asked_;      ///< by rank: the last agreement about which this rank has asked that rank
  std::map<int, std::int64_t> questions_;  ///< by rank: the agreement of its question that is not answered yet
  std::map<int, std::int64_t> answers_;    ///< by rank: the last agreement for which that rank has answered
};

}  // namespace muster::detail::comm
