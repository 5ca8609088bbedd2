// Stopping a run on request: all workers stop at the same boundary, and no batch or report is left half done.
//
// A boundary is a point that all workers reach in the same order: the next batch of a training pass, the next epoch, a
// report. The decision to stop there uses only what the workers have exchanged, so it is the same on all of them.
#pragma once

#include "base/export.hpp"
#include "muster/communicator.hpp"
#include "muster/error.hpp"
#include "muster/state.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <utility>

namespace muster::detail::session {

/// What all workers know about requests to stop. They exchange it at some of the boundaries.
class StopRequest {
 public:
  /// True if all workers know that one of them has been asked to stop. The same on each worker at the same boundary.
  bool is_known() const noexcept { return known_; }
  /// Notes the result of another collective in which the workers have exchanged their requests. exchange() then counts
  /// the boundaries from here until it communicates.
  void merge(bool any_asked) noexcept;
  /// Call it at every boundary. Asks the other workers at some of the boundaries, until is_known(). After the first
  /// boundaries it asks so seldom that asking takes about 1% of the time. True if it has asked them now. Collective.
  bool exchange(const Communicator& communicator, bool asked_here);

 private:
  using Clock = std::chrono::steady_clock;

  bool known_ = false;
  std::int64_t interval_ = 1;    ///< number of boundaries from one exchange to the next; the same on all workers
  std::int64_t boundaries_ = 0;  ///< boundaries since the last exchange or merge()
  Clock::duration cost_{};       ///< how long the last exchange took
  Clock::time_point exchanged_{};
};

/// A file in the run's folder that stops the run if it exists, so that a person can stop a job without access to its
/// processes. Only one rank looks for it.
class MUSTER_INTERNAL_API StopFile {
 public:
  /// A file that never exists.
  StopFile() = default;
  explicit StopFile(std::filesystem::path path) : path_(std::move(path)) {}
  /// True if the file exists or was there at an earlier call. Looks for it at most once a second.
  bool exists();
  /// Removes the file. Call it when the run has stopped or ended.
  void remove() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  std::filesystem::path path_;
  bool seen_ = false;
  Clock::time_point looked_{};
};

/// The States that a stop may save. Workers note the same States in the same order, but a State may be destroyed
/// earlier on one worker than on another.
class LivingStates {
 public:
  /// Call it when a State was restored or reported.
  void note(const std::shared_ptr<const StateEntries>& entries);
  /// Returns the newest State that lives on this worker; null if none does.
  std::shared_ptr<const StateEntries> lock() const noexcept { return newest_until(count_).second; }
  /// Returns the newest State that lives on all workers; null if none does. Collective.
  std::shared_ptr<const StateEntries> lock_on_all(const Communicator& workers) const;

 private:
  /// Returns the newest living State with this number or a lower one, after its number; −1 and null if none lives.
  std::pair<std::int64_t, std::shared_ptr<const StateEntries>> newest_until(std::int64_t number) const noexcept;

  std::map<std::int64_t, std::weak_ptr<const StateEntries>> by_number_ = {};
  std::int64_t count_ = 0;
};

/// Estimates the time that a run needs to stop in an orderly way: the longest time between two boundaries at which the
/// workers have exchanged requests to stop, plus two saves (three if one is running in the background), plus one
/// second. A save is taken to last as long as the slowest of this attempt, or as expect_save_bytes() tells before the
/// first; if the save in the background has been running for longer, as long as that.
class ShutdownBudget {
 public:
  using Clock = std::chrono::steady_clock;

  /// Call it at a boundary where the workers exchange requests to stop. The time until left_boundary() does not count
  /// as time between boundaries.
  void reached_boundary() noexcept;
  void left_boundary() noexcept { left_ = Clock::now(); }
  /// Sets the estimate of a save's time that holds until the first save: `bytes` at 100 MB/s.
  void expect_save_bytes(double bytes) noexcept { expected_ = std::chrono::duration<double>(bytes / 1e8); }
  void note_save_duration(Clock::duration cost) noexcept { slowest_ = std::max(slowest_.value_or(cost), cost); }
  /// Returns the estimate. `under_way`: how long the save in the background has been running; none if there is none.
  std::chrono::nanoseconds full_budget(std::optional<Clock::duration> under_way) const noexcept;
  /// Returns a shorter estimate, which is just enough to reach the next boundary and save there once.
  std::chrono::nanoseconds least_budget(std::optional<Clock::duration> under_way) const noexcept;

 private:
  std::chrono::nanoseconds saves_take(int count, std::optional<Clock::duration> under_way) const noexcept;

  Clock::time_point left_{};
  Clock::duration longest_interval_{};
  std::chrono::duration<double> expected_{};
  std::optional<Clock::duration> slowest_ = {};
};

}  // namespace muster::detail::session
