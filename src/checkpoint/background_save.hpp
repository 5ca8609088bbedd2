// The part of a save that a thread of each rank does while training goes on, and the time that saves take.
#pragma once

#include "checkpoint/save.hpp"
#include "muster/communicator.hpp"
#include "muster/error.hpp"

#include <functional>
#include <future>
#include <optional>

namespace muster::detail::checkpoint {

/// One save at a time. Not collective unless it says so.
class BackgroundSave {
 public:
  BackgroundSave() = default;
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;
  /// Waits until the work has ended.
  ~BackgroundSave();

  /// Makes a communicator for the threads of all ranks. Before that, run() must not be called. Collective.
  void enable(const Communicator& ranks);
  bool is_enabled() const noexcept { return communicator_.has_value(); }

  /// Notes when a save began.
  void begin(Clock::time_point at) noexcept { begun_ = at; }
  /// Notes that the save has ended; it had no part in the background.
  void end_without_work() noexcept { last_duration_ = Clock::now() - begun_; }
  /// Runs `work` on the thread. If MPI may be called by one thread only, runs it here. Collective.
  void run(std::function<void(const Communicator&)> work);

  bool is_running() const;
  /// Waits for the work. True if it succeeded, the same on all ranks.
  bool wait() const { return !result_.valid() || !result_.get(); }
  /// Waits for the work and returns its error, the same on all ranks. After that there is no work.
  std::optional<Error> finish();

  /// How long the last save took, once finish() has returned.
  std::optional<Clock::duration> last_duration() const noexcept { return last_duration_; }
  /// How long the work has taken so far since begin(), or took in all; none after finish().
  std::optional<Clock::duration> current_duration() const;

 private:
  std::optional<Communicator> communicator_ = {};
  Clock::time_point begun_ = {}, ended_ = {};
  std::optional<Clock::duration> last_duration_ = {};
  std::shared_future<std::optional<Error>> result_ = {};
};

}  // namespace muster::detail::checkpoint
