// What the groups of a sweep share while each of them runs its own trial: which trial is next, and the trials' scores
// at the scheduler's rungs. No group waits for another.
#pragma once

#include "group/mpi_store.hpp"
#include "muster/communicator.hpp"

#include <chrono>
#include <cstddef>
#include <map>
#include <vector>

namespace muster::detail::sweep {

/// The scores at one rung, by trial number.
using Scores = std::map<int, double>;

class TrialQueue {
 public:
  /// `rungs`: the scores from earlier starts, the same on all ranks. Collective.
  TrialQueue(const Communicator& world, const std::vector<Scores>& rungs, std::chrono::milliseconds timeout);

  /// Returns 0, 1, …: another number at each call of any rank.
  std::size_t next_index();
  /// Adds a score, and returns all scores of that rung so far.
  Scores add_score(std::size_t rung, int trial, double score);

 private:
  group::MpiStore store_;
};

}  // namespace muster::detail::sweep
