#include "watch/time_use.hpp"

#include <atomic>
#include <optional>

namespace muster::detail::watch {
namespace {

using Clock = std::chrono::steady_clock;

/// The time use of a thread. `use` does not contain the time of the current activity, which has begun at `since`.
struct ThreadTime {
  TimeUse use = {};
  std::optional<Activity> current = {};
  Clock::time_point since = {};

  void switch_to(std::optional<Activity> next) noexcept;
};
thread_local ThreadTime time_of_thread;
std::atomic<std::int64_t> read_ns{0};

std::chrono::nanoseconds& time_of(TimeUse& use, Activity activity) noexcept {
  return activity == Activity::wait   ? use.wait
         : activity == Activity::data ? use.data
         : activity == Activity::save ? use.save
                                      : use.save_wait;
}

void ThreadTime::switch_to(std::optional<Activity> next) noexcept {
  const auto now = Clock::now();
  if (current) time_of(use, *current) += now - since;
  current = next;
  since = now;
}

}  // namespace

TimeUse time_use() noexcept { return time_of_thread.use; }

ScopedActivity::ScopedActivity(Activity activity) noexcept {
  const bool is_saving = time_of_thread.current == Activity::save || time_of_thread.current == Activity::save_wait;
  if (is_saving) activity = activity == Activity::wait ? Activity::save_wait : *time_of_thread.current;
  switches_ = time_of_thread.current != activity;
  if (!switches_) return;
  before_ = time_of_thread.current;
  time_of_thread.switch_to(activity);
}

ScopedActivity::~ScopedActivity() {
  if (switches_) time_of_thread.switch_to(before_);
}

ScopedFileRead::~ScopedFileRead() {
  read_ns.fetch_add(std::chrono::nanoseconds(Clock::now() - begun_).count(), std::memory_order_relaxed);
}

std::chrono::nanoseconds file_read_time() noexcept {
  return std::chrono::nanoseconds(read_ns.load(std::memory_order_relaxed));
}

}  // namespace muster::detail::watch
