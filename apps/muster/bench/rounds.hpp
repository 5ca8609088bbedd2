// Rounds inside one program: every candidate runs once in each, in rotated order, behind a barrier.
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
  /// When it is over, there are no more rounds than the least that give an interval; none: there are `most`.
  std::optional<std::chrono::seconds> budget = {};
};

/// Counts the rounds of a case, from its construction on.
class Pace {
 public:
  explicit Pace(const Rounds& rounds) : rounds_(rounds) {}
  /// Whether there is another round after those that were begun. Asked once before each.
  bool another();
  /// "round 3 of at most 31, about 40 s left"; the time is known from the second round on.
  std::string text() const;

 private:
  double seconds() const;

  Rounds rounds_;
  int begun_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Is told of each round, as Pace says it.
using Progress = std::function<void(const std::string& round)>;

struct Candidate {
  std::string name;
  int operations = 1;                    ///< that one call of run() does
  std::function<void()> run;             ///< what is timed
  std::function<void()> before = [] {};  ///< not timed: makes what run() takes
  std::function<void()> after = [] {};   ///< not timed: checks what run() has made
};

/// The time of a round is that of the slowest rank; the same result on every rank. Collective.
Timings measure(const Communicator& communicator, const std::vector<Candidate>& candidates, const Rounds& rounds,
                const Progress& progress);

/// Whether rank 0's pace has another round. Collective.
bool another(Pace& pace, const Communicator& communicator);

/// Runs `work` behind a barrier; the milliseconds that the slowest rank took. Collective.
double timed(const Communicator& communicator, const std::function<void()>& work);

/// Whether all ranks hold the same bytes. Collective.
bool same_on_all_ranks(const Communicator& communicator, std::span<const std::byte> bytes);

}  // namespace muster::bench
