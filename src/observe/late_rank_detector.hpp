// The rule by which a worker counts as late, and what makes it late.
#pragma once

#include "muster/callback.hpp"
#include "observe/rank_times.hpp"

#include <chrono>
#include <cstddef>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace muster::detail::observe {

/// A worker is late in a window if its own part is longer than the median of the other workers' by more than 10% of the
/// window. It is late if it was in 8 of the last 10 windows, until it was in at most 2 of the last 10. What the
/// kernel has counted needs less proof: a worker is late as well while it is behind by more than 10% of the last 10
/// windows together, and for half of that its control group was out of processor time, in 2 windows or more, since a
/// quota holds a worker up in bursts; or it had no core, in 5 windows or more.
///
/// The same holds for saves, which few windows have: a worker is late if its own part of a save is longer than the
/// median of the others' by more than 10% of the time since the save before, and 20 ms, in 8 of the last 10 saves: rank
/// 0 always has a little more to do.
class LateRankDetector {
 public:
  static constexpr double min_share_behind = 0.10, min_seconds_behind_in_save = 0.02;  ///< a share; seconds
  static constexpr std::size_t windows = 10, late_windows = 8, on_time_windows = 2, late_windows_without_core = 5,
                               late_windows_by_quota = 2;

  /// `hosts`: of each worker.
  explicit LateRankDetector(std::vector<std::string> hosts)
      : hosts_(std::move(hosts)), is_late_(hosts_.size()), is_late_at_saves_(hosts_.size()) {}

  /// Adds a window. Returns the workers that have become late with it.
  std::vector<LateRank> add(StepWindow window);

 private:
  std::vector<LateRank> add_save(const StepWindow& window);
  std::size_t late_count(std::size_t rank) const;
  bool is_held_up(std::size_t rank) const;
  LateRank describe(std::size_t rank) const;

  struct Window {
    StepWindow content;
    std::vector<double> behind;  ///< [rank]: as a share of the window; negative if it is ahead
  };
  struct Save {
    double seconds = 0;          ///< since the save before
    std::vector<double> behind;  ///< [rank]: in seconds
  };
  std::vector<std::string> hosts_;
  std::vector<bool> is_late_, is_late_at_saves_;
  std::deque<Window> last_ = {};      ///< at most `windows`
  std::deque<Save> last_saves_ = {};  ///< at most `windows`
  double seconds_since_save_ = 0;
};

/// The cause for a worker whose time is `behind` seconds longer than the other workers' median. `times` and `load` are
/// its own; `others` are the medians of the other workers.
LateCause cause_of(double behind, const RankTimes& times, const RankLoad& load, const RankTimes& others,
                   const RankLoad& others_load);

/// The warning about a late rank.
std::string text_of(const LateRank& late);

/// Which late ranks are worth a line. A rank and a cause are named once, and again after 10 minutes, then 20, 40 and so
/// on. On a machine with other work, its ranks are late in turn, each for a moment: that is said once for all of them.
class LateRankWarnings {
 public:
  using Clock = std::chrono::steady_clock;
  /// The line about a rank that has become late; empty if nothing is to be said.
  std::string line_about(const LateRank& late, Clock::time_point now = Clock::now());

 private:
  struct Topic {
    int rank = 0;  ///< the first that was named
    LateCause cause = LateCause::computation;
    bool in_turn = false;  ///< it was said that ranks are late in turn
    Clock::time_point next = {};
    std::chrono::minutes interval{10};
  };
  std::map<std::tuple<std::string, int, LateCause>, Topic> topics_ = {};  ///< by host, rank and cause
};

}  // namespace muster::detail::observe
