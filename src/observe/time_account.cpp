#include "observe/time_account.hpp"

#include "base/json.hpp"
#include "observe/history.hpp"
#include "observe/status_file.hpp"
#include "watch/process.hpp"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace muster::detail::observe {
namespace {

/// Limits for status.json, which is written every few seconds: the last starts, and the first bytes of their errors.
constexpr std::size_t most_starts = 200, most_error_bytes = 300;
/// When training last ended in this process, in seconds since 1970. A process may train several runs.
std::atomic<double> last_end{0};

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Returns the time at which this process was started, in seconds since 1970.
double process_start() {
  timespec boot_time{};
  ::clock_gettime(CLOCK_BOOTTIME, &boot_time);
  const auto since_boot = static_cast<double>(boot_time.tv_sec) + 1e-9 * static_cast<double>(boot_time.tv_nsec);
  const auto ticks = static_cast<double>(::sysconf(_SC_CLK_TCK));
  return seconds_since_1970() - since_boot + static_cast<double>(watch::start_time_of(::getpid())) / ticks;
}

/// Returns one number of "rank_times" in a row; 0 if it is not there.
double part_of(const Json& row, const char* activity, const char* value) {
  const auto times = row.find("rank_times");
  if (times == row.end() || !times->is_object() || !times->contains(activity)) return 0;
  return number_at(times->at(activity), value);
}

/// Returns how much longer the median worker has waited than the worker that has waited least; of two workers, how much
/// longer one has waited than the other.
double late_in(const Json& row) {
  const bool are_two = number_at(row, "world_size") == 2;
  return part_of(row, "wait", are_two ? "max" : "median") - part_of(row, "wait", "min");
}

}  // namespace

TimeAccount::~TimeAccount() {
  if (has_started_) last_end = seconds_since_1970();
}

void TimeAccount::start(const AttemptStart& start) {
  has_started_ = true;
  attempt_ = start;
  started_ = seconds_since_1970();
  began_ = Clock::now();
  at_start_ = watch::time_use();
  const auto before = read_status(run_);
  const double begun = std::max(process_start(), last_end.load());
  if (before.is_null()) {
    starting_s_ = std::max(started_ - begun, 0.0);
    return;
  }
  const auto time = before.value("time", Json());
  for (const auto& earlier : before.value("starts", Json()))
    if (earlier.is_object()) earlier_starts_.push_back(earlier);
  if (!earlier_starts_.empty() && earlier_starts_.back().value("state", Json()) == "training")
    earlier_starts_.back()["state"] = "died";
  if (earlier_starts_.size() >= most_starts) earlier_starts_.erase(0);
  earlier_training_s_ = number_at(time, "training_s");
  auto last_sign = earlier_starts_.empty() ? begun : number_at(earlier_starts_.back(), "ended");
  // Some runs save more often than status.json is written. Then the checkpoint is a later sign of life.
  const auto unseen = start.time_total_s + number_at(time, "repeated_s") - earlier_training_s_;
  if (!earlier_starts_.empty() && unseen > 0 && last_sign + unseen < begun) {
    earlier_training_s_ += unseen;
    last_sign += unseen;
    earlier_starts_.back()["ended"] = last_sign;
  }
  idle_s_ = number_at(time, "idle_s") + std::max(begun - last_sign, 0.0);
  starting_s_ = number_at(time, "starting_s") + std::max(started_ - std::max(begun, last_sign), 0.0);
  repeated_s_ = repeated_after(number_at(time, "repeated_s"), start.time_total_s);
  if (number_at(before, "training_iteration") == static_cast<double>(start.training_iteration)) {
    spent_ = {number_at(time, "data_s"), number_at(time, "saves_s"), number_at(time, "late_s")};
    return;
  }
  for (const auto& row : History::read(run_)) {
    if (number_at(row, "training_iteration") > static_cast<double>(start.training_iteration)) continue;
    report(row);
    spent_.saves += part_of(row, "save", "max");
  }
}

/// Adds to `before` the seconds that the last start has trained after the step from which training resumes now. A start
/// that has finished or was stopped has saved all of its steps, so nothing is repeated.
double TimeAccount::repeated_after(double before, double time_total_s) const {
  // There was no earlier start, or an earlier version of muster has written it.
  if (earlier_starts_.empty() || !earlier_starts_.back().contains("first_time_total_s"))
    return std::max(earlier_training_s_ - time_total_s, 0.0);
  const auto& last = earlier_starts_.back();
  const auto state = last.value("state", Json());
  if (state == "finished" || state == "stopped") return before;
  const auto trained = number_at(last, "ended") - number_at(last, "started");
  return before + std::max(trained - (time_total_s - number_at(last, "first_time_total_s")), 0.0);
}

void TimeAccount::report(const Json& row) {
  spent_.data += part_of(row, "data", "median");
  spent_.late += std::max(late_in(row), 0.0);
}

void TimeAccount::add_to(Json& status, const std::string& state, const std::string& error) const {
  if (!has_started_) {
    const auto before = read_status(run_);
    for (const char* key : {"time", "starts"})
      if (before.is_object() && before.contains(key)) status[key] = before.at(key);
    return;
  }
  const double training = std::chrono::duration<double>(Clock::now() - began_).count();
  const auto use = watch::time_use() - at_start_;
  const double saves = std::chrono::duration<double>(use.save + use.save_wait).count();
  status["time"] = {{"training_s", earlier_training_s_ + training},
                    {"repeated_s", repeated_s_},
                    {"data_s", spent_.data},
                    {"saves_s", spent_.saves + saves},
                    {"late_s", spent_.late},
                    {"starting_s", starting_s_},
                    {"idle_s", idle_s_}};
  auto starts = earlier_starts_;
  starts.push_back({{"started", started_},
                    {"ended", started_ + training},
                    {"world_size", world_size_},
                    {"first_iteration", attempt_.training_iteration},
                    {"first_step", attempt_.global_step},
                    {"first_time_total_s", attempt_.time_total_s},
                    {"state", state}});
  if (!error.empty()) starts.back()["error"] = error.substr(0, std::min(error.find('\n'), most_error_bytes));
  status["starts"] = std::move(starts);
}

}  // namespace muster::detail::observe
