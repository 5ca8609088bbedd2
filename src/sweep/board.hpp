// What the groups of a sweep share while each is busy with a trial of its own: which trial is next, and how the trials
// have done at the scheduler's rungs. No group waits for another.
#pragma once

#include "group/store.hpp"
#include "muster/communicator.hpp"

#include <chrono>
#include <cstddef>
#include <map>
#include <vector>

namespace muster::detail::sweep {

/// The scores at one rung, by the number of the trial.
using Scores = std::map<int, double>;

class Board {
 public:
  /// `rungs`: what is known from earlier starts, the same on all ranks. Collective.
  Board(const Communicator& world, const std::vector<Scores>& rungs, std::chrono::milliseconds limit);

  /// From 0 on, another number at each call of any rank.
  std::size_t next();
  /// Notes the score, and gives all that there are then.
  Scores add(std::size_t rung, int trial, double score);

 private:
  group::Store store_;
};

}  // namespace muster::detail::sweep
