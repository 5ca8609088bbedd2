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

/// In one window, a worker is behind if its own part of the time (RankTimes::own()) is longer than the median of the
/// other workers' by more than 10% of the window. It counts as late when it was behind in 8 of the last 10 windows,
/// until it was behind in at most 2 of the last 10.
///
/// If the kernel's counters explain the delay, fewer windows are enough. A worker also counts as late if, over the last
/// 10 windows together, it is behind by more than 10% and at least half of the delay has one of two causes: its control
/// group had used up its processor time, and the worker was behind in 2 windows or more (a quota delays in bursts); or
/// it had no core, and was behind in 5 windows or more.
///
/// Saves happen in few windows, so they have a rule of their own. A worker counts as late at saves if in 8 of the last
/// 10 saves its own part was longer than the median of the other workers' by more than 10% of the time since the save
/// before, and by more than 20 ms, since rank 0 always has a little more to do. It does until that is so in at most 2
/// of them.
class LateRankDetector {
 public:
  static constexpr double min_share_behind = 0.10, min_seconds_behind_in_save = 0.02;  ///< a share; seconds
  static constexpr std::size_t windows = 10, late_windows = 8, on_time_windows = 2, late_windows_without_core = 5,
                               late_windows_by_quota = 2;

  /// `hosts`: the host of each worker.
  explicit LateRankDetector(std::vector<std::string> hosts)
      : hosts_(std::move(hosts)), is_late_(hosts_.size()), is_late_at_saves_(hosts_.size()) {}

  /// Adds a window. Returns the workers that count as late from this window on.
  std::vector<LateRank> add(StepWindow window);

 private:
  std::vector<LateRank> add_save(const StepWindow& window);
  std::size_t late_count(std::size_t rank) const;
  bool is_held_up(std::size_t rank) const;
  LateRank describe(std::size_t rank) const;

  struct Window {
    StepWindow content;
    /// For each worker, how far it is behind, as a part of the window; negative if it is ahead.
    std::vector<double> behind;
  };
  struct Save {
    double seconds = 0;          ///< since the save before
    std::vector<double> behind;  ///< for each worker, how far it is behind, in seconds
  };
  std::vector<std::string> hosts_;
  std::vector<bool> is_late_, is_late_at_saves_;
  std::deque<Window> last_ = {};      ///< at most `windows`
  std::deque<Save> last_saves_ = {};  ///< at most `windows`
  double seconds_since_save_ = 0;
};

/// Returns the cause why a worker's time is `behind` seconds longer than the median of the other workers'. `times` and
/// `load`: the worker's. `others`, `others_load`: medians of the other workers.
LateCause cause_of(double behind, const RankTimes& times, const RankLoad& load, const RankTimes& others,
                   const RankLoad& others_load);

/// Returns the text of the warning about a late rank.
std::string text_of(const LateRank& late);

/// Decides which late ranks are worth a line in the log. The first line about a rank and a cause comes at once. If the
/// rank becomes late again for this cause, the next line comes at the earliest 10 minutes later, then 20, 40 and so on.
/// Other programs on a machine slow its ranks in turn, each for a short time: so all ranks of a host that are late by a
/// shared core or by longer computation share these intervals, and the line about a second one says that they are late
/// in turn.
class LateRankWarnings {
 public:
  using Clock = std::chrono::steady_clock;
  /// Returns the line about a rank that has become late; empty if none is worth it now.
  std::string line_about(const LateRank& late, Clock::time_point now = Clock::now());

 private:
  struct Topic {
    int rank = 0;  ///< the rank that the first line was about
    LateCause cause = LateCause::computation;
    bool in_turn = false;  ///< true if a line has said that the ranks are late in turn
    Clock::time_point next = {};
    std::chrono::minutes interval{10};
  };
  /// By host, rank and cause. For a shared core and longer computation, the rank is −1 and the cause shared_core.
  std::map<std::tuple<std::string, int, LateCause>, Topic> topics_ = {};
};

}  // namespace muster::detail::observe
