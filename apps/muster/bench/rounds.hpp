// Measures candidates inside one program: in each round every candidate runs once, in rotated order, after a barrier.
#pragma once

#include "row.hpp"

#include <muster/communicator.hpp>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace muster::bench {

using Clock = std::chrono::steady_clock;

/// How many rounds a case has.
struct Rounds {
  int most;
  /// After the first round, another one begins only if it would end before this time, were it as long as the last one.
  /// None if there always are `most` rounds.
  std::optional<Clock::time_point> end = {};
};

/// Counts the rounds of a case; the time begins with its construction.
class RoundTimer {
 public:
  explicit RoundTimer(const Rounds& rounds) : rounds_(rounds) {}
  /// True if there is another round. Call it once before each round.
  bool has_next();
  /// Returns "round 3 of at most 31, at most 40 s left".
  std::string text() const;

 private:
  Rounds rounds_;
  int begun_ = 0;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = start_;  ///< when the current round began
};

/// How a case is measured, and whom to inform.
struct Measurement {
  Rounds rounds;
  /// Called with a text that says what is measured now.
  std::function<void(const std::string&)> show = [](const auto&) {};
  /// Called with the reason why a candidate has no result, or a row has fewer rounds than were planned.
  std::function<void(const std::string&)> warn = [](const auto&) {};
  /// Called after each round with the times of all rounds so far.
  std::function<void(const Timings&)> keep = [](const auto&) {};
};

struct Candidate {
  std::string name;
  int operations = 1;                    ///< number of operations in one call of run()
  std::function<void()> run;             ///< timed
  std::function<void()> before = [] {};  ///< not timed; prepares the input of run()
  std::function<void()> after = [] {};   ///< not timed; checks the results of run()
};

/// Measures all candidates. The time of a round is that of the slowest rank. Returns the same on every rank.
/// Collective.
Timings measure(const Communicator& communicator, const std::vector<Candidate>& candidates,
                const Measurement& measurement);

/// True if rank 0's timer has another round. Collective.
bool has_next_round(RoundTimer& timer, const Communicator& communicator);

/// Calls `work` after a barrier. Returns the time of the slowest rank in milliseconds. Collective.
double timed(const Communicator& communicator, const std::function<void()>& work);

/// True if all ranks have the same bytes. Collective.
bool same_on_all_ranks(const Communicator& communicator, std::span<const std::byte> bytes);

}  // namespace muster::bench
