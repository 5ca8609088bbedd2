#include "session/stop.hpp"

#include "base/log.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <system_error>
#include <utility>

namespace muster::detail::session {
void StopRequest::merge(bool any_asked) noexcept {
  known_ = known_ || any_asked;
  boundaries_ = 0;
  exchanged_ = {};
}

bool StopRequest::exchange(const Communicator& communicator, bool asked_here) {
  if (known_ || ++boundaries_ < interval_) return false;
  constexpr double share = 0.01;
  const auto begin = Clock::now();
  double boundaries = 1;
  if (exchanged_ != Clock::time_point{} && begin > exchanged_) {
    const auto each = std::chrono::duration<double>(begin - exchanged_).count() / static_cast<double>(boundaries_);
    boundaries = std::ceil(std::chrono::duration<double>(cost_).count() / (share * each));
  }
  // Limit the growth of the interval, so that one slow exchange does not delay the next one for long.
  const auto most = static_cast<double>(2 * interval_);
  std::array<std::int64_t, 2> words{asked_here, static_cast<std::int64_t>(std::clamp(boundaries, 1.0, most))};
  communicator.all_reduce(std::span(words), ReduceOp::max);
  exchanged_ = Clock::now();
  cost_ = exchanged_ - begin;
  known_ = words[0] != 0;
  interval_ = words[1];
  boundaries_ = 0;
  return true;
}

bool StopFile::exists() {
  if (seen_ || path_.empty()) return seen_;
  const auto now = Clock::now();
  if (now - looked_ < std::chrono::seconds(1)) return false;
  looked_ = now;
  std::error_code ignored;  // the file system may fail to answer; the next call asks again
  seen_ = std::filesystem::exists(path_, ignored);
  if (seen_) log::info("stopping, as " + path_.string() + " is there");
  return seen_;
}

void StopFile::remove() noexcept {
  if (path_.empty()) return;
  std::error_code error;
  std::filesystem::remove(path_, error);
  if (error)
    log::warn("removing " + path_.string() + ": " + error.message() +
              ". Remove it, since it stops the next start, too");
}

void LivingStates::note(const std::shared_ptr<const StateEntries>& entries) {
  std::erase_if(by_number_, [&](const auto& one) {
    const auto other = one.second.lock();
    return !other || other == entries;
  });
  by_number_.emplace(count_++, entries);
}

std::pair<std::int64_t, std::shared_ptr<const StateEntries>> LivingStates::newest_until(
    std::int64_t number) const noexcept {
  for (auto after = by_number_.upper_bound(number); after != by_number_.begin();)
    if (auto entries = (--after)->second.lock()) return {after->first, std::move(entries)};
  return {-1, nullptr};
}

std::shared_ptr<const StateEntries> LivingStates::lock_on_all(const Communicator& workers) const {
  for (auto number = count_;;) {
    const auto [newest, entries] = newest_until(number);
    std::array<std::int64_t, 2> least_and_most{newest, -newest};
    workers.all_reduce(std::span(least_and_most), ReduceOp::min);
    number = least_and_most[0];
    if (number == -least_and_most[1]) return entries;
  }
}

void ShutdownBudget::reached_boundary() noexcept {
  if (left_ != Clock::time_point{}) longest_interval_ = std::max(longest_interval_, Clock::now() - left_);
}

std::chrono::nanoseconds ShutdownBudget::full_budget(std::optional<Clock::duration> under_way) const noexcept {
  return longest_interval_ + saves_take(2, under_way) + std::chrono::seconds(1);
}

std::chrono::nanoseconds ShutdownBudget::least_budget(std::optional<Clock::duration> under_way) const noexcept {
  return longest_interval_ + saves_take(1, under_way);
}

/// Returns how long `count` saves take, and one more if a save is running in the background.
std::chrono::nanoseconds ShutdownBudget::saves_take(int count,
                                                    std::optional<Clock::duration> under_way) const noexcept {
  const auto save = std::max(slowest_.value_or(std::chrono::duration_cast<Clock::duration>(expected_)),
                             under_way.value_or(Clock::duration{}));
  return (under_way ? count + 1 : count) * save;
}

}  // namespace muster::detail::session
