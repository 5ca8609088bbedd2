// Rounds inside one program: every candidate runs once in each, in rotated order, behind a barrier.
#pragma once

#include "row.hpp"

#include <muster/communicator.hpp>

#include <functional>
#include <string>
#include <vector>

namespace muster::bench {

struct Candidate {
  std::string name;
  int operations = 1;                    ///< that one call of run() does
  std::function<void()> run;             ///< what is timed
  std::function<void()> before = [] {};  ///< not timed: makes what run() takes
  std::function<void()> after = [] {};   ///< not timed: checks what run() has made
};

/// The time of a round is that of the slowest rank; the same result on every rank. `progress` is told of each round.
/// Collective.
Timings measure(const Communicator& communicator, const std::vector<Candidate>& candidates, int rounds,
                const std::function<void(int round)>& progress);

/// Runs `work` behind a barrier; the milliseconds that the slowest rank took. Collective.
double timed(const Communicator& communicator, const std::function<void()>& work);

/// Whether all ranks hold the same bytes. Collective.
bool same_on_all_ranks(const Communicator& communicator, std::span<const std::byte> bytes);

}  // namespace muster::bench
