// Runs the part of a save that a thread of each rank does while training continues, and measures how long saves take.
#pragma once

#include "checkpoint/save.hpp"
#include "muster/communicator.hpp"
#include "muster/error.hpp"

#include <functional>
#include <future>
#include <optional>

namespace muster::detail::checkpoint {

/// Runs one save at a time. Functions are not collective unless they say so.
class BackgroundSave {
 public:
  BackgroundSave() = default;
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;
  /// Waits until the work that run() has begun has ended.
  ~BackgroundSave();

  /// Makes the communicator that run() passes to its work. run() may only be called after this. Collective.
  void enable(const Communicator& ranks);
  bool is_enabled() const noexcept { return communicator_.has_value(); }

  /// Records that a save began at this time.
  void begin(Clock::time_point at) noexcept { begun_ = at; }
  /// Records that the save has ended without a call of run().
  void end_without_work() noexcept { last_duration_ = Clock::now() - begun_; }
  /// Begins `work` on a thread of this rank and returns. If only one thread may call MPI, runs it here before
  /// returning. Collective.
  void run(std::function<void(const Communicator&)> work);

  bool is_running() const;
  /// Waits for the work. True if it succeeded or there is no work; the same on all ranks.
  bool wait() const { return !result_.valid() || !result_.get(); }
  /// Waits for the work and returns its error, the same on all ranks; none if it succeeded or there is no work.
  /// Afterwards there is no work until the next run().
  std::optional<Error> finish();

  /// How long the last save took from begin() to its end, as finish() or end_without_work() has recorded it; none
  /// before the first.
  std::optional<Clock::duration> last_duration() const noexcept { return last_duration_; }
  /// How long the present save has taken since begin(), to now or to its end; none before run() and after finish().
  std::optional<Clock::duration> current_duration() const;

 private:
  std::optional<Communicator> communicator_ = {};
  Clock::time_point begun_ = {}, ended_ = {};
  std::optional<Clock::duration> last_duration_ = {};
  std::shared_future<std::optional<Error>> result_ = {};
};

}  // namespace muster::detail::checkpoint
