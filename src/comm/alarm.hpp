// Error notices between all ranks of a world, over a separate communicator. Waits on the world's communicators poll for
// them.
#pragma once

#include "comm/mpi_call.hpp"
#include "comm/outcome.hpp"
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

/// Sends this rank's error to all other ranks, and receives the errors of other ranks.
class Alarm {
 public:
  explicit Alarm(PooledCommunicator comm);
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;
  ~Alarm();

  /// Sends this rank's failure to all other ranks, once per attempt.
  void raise(const Outcome& mine);
  /// The failure that this rank, on any of its threads, has raised since the last clear().
  std::optional<Outcome> raised() const {
    const std::lock_guard lock(mutex_);
    return raised_;
  }
  /// Throws RemoteError if another rank has raised an alarm; every call until clear() throws the same error.
  void throw_if_raised();
  /// Receives a notice if one has come; does nothing while another thread uses the alarm. throw_if_raised() throws the
  /// first notice received.
  void poll();
  /// The lowest rank that is known to have waited too long: this rank, or a rank whose notice was received.
  std::optional<int> stalled() const noexcept {
    const int rank = stalled_;
    return rank == nobody ? std::nullopt : std::optional(rank);
  }
  /// Receives the outstanding notices of the ranks that have raised an alarm (`raised[rank]`) and resets the alarm.
  void clear(const std::vector<bool>& raised);

 private:
  void note(const Letter& notice);
  void note_stalled(int rank);

  const PooledCommunicator comm_;
  const int rank_;
  const int size_;
  mutable std::mutex mutex_;
  std::optional<Outcome> raised_;
  std::shared_ptr<std::string> sent_;   // kept until the sends have completed
  std::vector<MPI_Request> sends_;      // this attempt's sends
  std::vector<bool> received_from_;     // [rank], in this attempt
  std::atomic<bool> is_raised_{false};  // by another rank: `cause_` is set, and fixed until clear()
  std::optional<RemoteError> cause_;
  static constexpr int nobody = std::numeric_limits<int>::max();
  std::atomic<int> stalled_{nobody};
  int tag_ = 0;  ///< alternates between attempts, since a rank may raise the next alarm while others still agree
};

}  // namespace muster::detail::comm
