// Error notices between all ranks of a world, over a communicator of their own: every wait listens for them.
#pragma once

#include "comm/agreement.hpp"

#include <mpi.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::comm {

class Alarm {
 public:
  explicit Alarm(MPI_Comm comm);

  /// Sends the notice to all other ranks, once per attempt.
  void raise(const Outcome& mine);
  /// What this rank has raised since the last clear(), if it has.
  const std::optional<Outcome>& raised() const noexcept { return raised_; }
  /// Throws the notice of another rank as RemoteError, again and again until clear().
  void listen();
  /// Takes in the notices of the ranks that raised (`raised[rank]`), and is silent again.
  void clear(const std::vector<bool>& raised);

 private:
  void take(const MPI_Status& status);

  const MPI_Comm comm_;
  const int rank_;
  const int size_;
  std::mutex mutex_;
  std::optional<Outcome> raised_;
  std::string sent_;                // stays until the sends are through
  std::vector<MPI_Request> sends_;  // of this attempt
  std::vector<bool> heard_;         // [rank], in this attempt
  std::atomic<bool> sounding_{false};
  int cause_rank_ = -1;
  Outcome cause_;
};

}  // namespace muster::detail::comm
