// Error notices between all ranks of a world, over a communicator of their own: every wait listens for them.
#pragma once

#include "comm/agreement.hpp"
#include "comm/pool.hpp"

#include <mpi.h>

#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::comm {

class Alarm {
 public:
  explicit Alarm(PooledCommunicator comm);
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;
  ~Alarm();

  /// Sends the notice to all other ranks, once per attempt.
  void raise(const Outcome& mine);
  /// What this rank has raised since the last clear(), if it has; any of its threads may have.
  std::optional<Outcome> raised() const {
    const std::lock_guard lock(mutex_);
    return raised_;
  }
  /// Throws the notice of another rank as RemoteError, again and again until clear().
  void listen();
  /// Takes in what other ranks have raised; what listen() throws stays the first of it.
  void hear();
  /// The lowest rank that waited too long, of those that have raised it here or were heard.
  std::optional<int> stalled() const noexcept {
    const int rank = stalled_;
    return rank == nobody ? std::nullopt : std::optional(rank);
  }
  /// Takes in the notices of the ranks that raised (`raised[rank]`), and is silent again.
  void clear(const std::vector<bool>& raised);

 private:
  void take(const MPI_Status& status);
  void note_stalled(int rank);

  const PooledCommunicator comm_;
  const int rank_;
  const int size_;
  mutable std::mutex mutex_;
  std::optional<Outcome> raised_;
  std::shared_ptr<std::string> sent_;  // stays until the sends are through
  std::vector<MPI_Request> sends_;     // of this attempt
  std::vector<bool> heard_;            // [rank], in this attempt
  std::atomic<bool> sounding_{false};
  int cause_rank_ = -1;
  Outcome cause_;
  static constexpr int nobody = std::numeric_limits<int>::max();
  std::atomic<int> stalled_{nobody};
  int tag_ = 0;  ///< of this attempt: who is ahead may raise the next one's while others still agree
};

}  // namespace muster::detail::comm
