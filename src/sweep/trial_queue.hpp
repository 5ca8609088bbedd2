// What the groups of a sweep share while each runs its own trial: the number of the next trial, and the trials' scores
// at the scheduler's rungs. No group waits for another.
#pragma once

#include "group/mpi_store.hpp"
#include "muster/communicator.hpp"

#include <chrono>
#include <cstddef>
#include <map>
#include <vector>

namespace muster::detail::sweep {

/// The scores at one rung, by the number of the trial.
using Scores = std::map<int, double>;

class TrialQueue {
 public:
  /// `rungs`: for each rung, the scores from earlier starts, the same on all ranks. `timeout`: how long a call waits
  /// for rank 0, which keeps the numbers and scores. Collective.
  TrialQueue(const Communicator& world, const std::vector<Scores>& rungs, std::chrono::milliseconds timeout);

  /// Returns 0, 1, 2, …: a different number at each call on any rank.
  std::size_t next_index();
  /// Adds a trial's score at a rung, and returns all scores at that rung so far.
  Scores add_score(std::size_t rung, int trial, double score);

 private:
  group::MpiStore store_;
};

}  // namespace muster::detail::sweep
