// Rounds inside one program: in each round every candidate runs once, in rotated order, after a barrier.
#pragma once

#include "row.hpp"

#include <muster/communicator.hpp>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace muster::bench {

/// How often a case is measured.
struct Rounds {
  int most;
  /// After this time, no further rounds once there are enough for an interval; empty: always `most` rounds.
  std::optional<std::chrono::seconds> budget = {};
};

/// Counts the rounds of a case, from its construction on.
class RoundTimer {
 public:
  explicit RoundTimer(const Rounds& rounds) : rounds_(rounds) {}
  /// True if there is another round; must be called once before each round.
  bool has_next();
  /// "round 3 of at most 31, about 40 s left"; the time is shown from the second round on.
  std::string text() const;

 private:
  double seconds() const;

  Rounds rounds_;
  int begun_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Called for each round with RoundTimer::text().
using Progress = std::function<void(const std::string& round)>;

struct Candidate {
  std::string name;
  int operations = 1;                    ///< the number of operations in one call of run()
  std::function<void()> run;             ///< the timed part
  std::function<void()> before = [] {};  ///< not timed: prepares the input of run()
  std::function<void()> after = [] {};   ///< not timed: checks the results of run()
};

/// Measures all candidates. The time of a round is that of the slowest rank; same result on every rank. Collective.
Timings measure(const Communicator& communicator, const std::vector<Candidate>& candidates, const Rounds& rounds,
                const Progress& progress);

/// True if rank 0's pace has another round. Collective.
bool has_next_round(RoundTimer& timer, const Communicator& communicator);

/// Runs `work` after a barrier; returns the time of the slowest rank in milliseconds. Collective.
double timed(const Communicator& communicator, const std::function<void()>& work);

/// True if all ranks have the same bytes. Collective.
bool same_on_all_ranks(const Communicator& communicator, std::span<const std::byte> bytes);

}  // namespace muster::bench
