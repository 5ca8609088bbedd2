// What a thread and its process spend their time on.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace muster::detail::watch {

/// What a thread does apart from computing.
enum class Activity : std::uint8_t {
  wait,       ///< a call in which ranks wait for each other or exchange data
  data,       ///< the next batch of a pass is not there yet
  save,       ///< a checkpoint is saved
  save_wait,  ///< a wait within a save; ScopedActivity replaces `wait` by it
};

/// The time that a thread has spent on each activity since it began. The time of an activity is added when the activity
/// ends or another one interrupts it. The rest of the thread's time is computation.
struct TimeUse {
  std::chrono::nanoseconds wait{0}, data{0}, save{0}, save_wait{0};

  TimeUse operator-(const TimeUse& earlier) const noexcept {
    return {wait - earlier.wait, data - earlier.data, save - earlier.save, save_wait - earlier.save_wait};
  }
  /// The time that is not computation.
  std::chrono::nanoseconds sum() const noexcept { return wait + data + save + save_wait; }
};
/// The time use of the calling thread.
TimeUse time_use() noexcept;

/// While it lives, this thread's time counts for the activity. Of nested scopes the innermost one counts. Within a
/// save, however, the time always counts for the save: as `save_wait` while ranks wait for each other, otherwise as
/// `save`.
class ScopedActivity {
 public:
  explicit ScopedActivity(Activity activity) noexcept;
  ~ScopedActivity();
  ScopedActivity(const ScopedActivity&) = delete;
  ScopedActivity& operator=(const ScopedActivity&) = delete;

 private:
  bool switches_ = false;
  std::optional<Activity> before_ = {};
};

/// While it lives, this thread reads values of a dataset from a file.
class ScopedFileRead {
 public:
  ScopedFileRead() noexcept : begun_(std::chrono::steady_clock::now()) {}
  ~ScopedFileRead();
  ScopedFileRead(const ScopedFileRead&) = delete;
  ScopedFileRead& operator=(const ScopedFileRead&) = delete;

 private:
  const std::chrono::steady_clock::time_point begun_;
};
/// The time that all threads of this process have spent in ScopedFileRead.
std::chrono::nanoseconds file_read_time() noexcept;

}  // namespace muster::detail::watch
