#include "observe/late_rank_detector.hpp"

#include "base/text.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

namespace muster {

namespace {

struct CauseWords {
  const char *fact, *remedy;
};
constexpr CauseWords cause_words[] = {  // in the order of LateCause
    {"its computation takes longer", "Compare its node with the others, or give it less to compute"},
    {"its core is shared with other processes", "Look for other processes there (top), or ask for whole cores"},
    {"other threads of its process use its core", "Ask for more cores for each rank, or use fewer threads"},
    {"its control group has used up its processor time", "Ask for more processor time, or use fewer threads"},
    {"its core is slowed down because it is too hot", "Have the node's cooling looked at, or leave the node out"},
    {"its memory is read back from swap or from files", "Ask for more memory, or use less of it"},
    {"it waits for its batches", "Prefetch more batches, or have them made faster"},
    {"it waits for the reading of files", "Look at the file system's load from there, or copy the data to the node"},
    {"it takes longer to save its part of the checkpoints",
     "Look at the file system's load from there, or save less often"}};
static_assert(std::size(cause_words) == static_cast<std::size_t>(LateCause::saving) + 1);

const CauseWords& words_of(LateCause cause) { return cause_words[static_cast<std::size_t>(cause)]; }

}  // namespace

std::string to_string(LateCause cause) { return words_of(cause).fact; }

}  // namespace muster

namespace muster::detail::observe {
namespace {

/// Lost processor time or major faults explain a delay if they account for at least this part of it. Waiting for
/// batches explains it from one half on.
constexpr double explaining_share = 0.3;
/// A typical time to read a page from a disk.
constexpr double seconds_per_major_fault = 1e-4;

/// Returns the median of of(worker) over all workers but `rank`.
template <class Of>
double median_of_others(std::size_t count, std::size_t rank, Of&& of) {
  std::vector<double> values;
  for (std::size_t other = 0; other < count; ++other)
    if (other != rank) values.push_back(of(other));
  return median(std::move(values));
}

std::string percent(double share) { return formatted("%.0f%%", 100 * share); }

/// Returns for each worker how much longer part(its times) is than the median of the other workers', in seconds.
std::vector<double> behind_in(const StepWindow& window, const std::function<double(const RankTimes&)>& part) {
  std::vector<double> behind;
  for (std::size_t rank = 0; rank < window.times.size(); ++rank)
    behind.push_back(part(window.times[rank]) - median_of_others(window.times.size(), rank, [&](std::size_t other) {
                       return part(window.times[other]);
                     }));
  return behind;
}

}  // namespace

LateCause cause_of(double behind, const RankTimes& times, const RankLoad& load, const RankTimes& others,
                   const RankLoad& others_load) {
  const double enough = explaining_share * behind;
  // First the quota, which also delays the threads that read data.
  if (load.throttled - others_load.throttled >= enough) return LateCause::cpu_quota;
  if (const double data = times.data - others.data; data >= behind / 2)
    return load.read - others_load.read >= data / 2 ? LateCause::file_system : LateCause::data;
  // A late worker hardly waits for others, so time in which it had no core has made it late.
  if (load.run_queue >= enough)
    return load.other_threads - others_load.other_threads >= load.run_queue / 2 ? LateCause::own_threads
                                                                                : LateCause::shared_core;
  if (static_cast<double>(load.major_faults) * seconds_per_major_fault >= enough) return LateCause::memory;
  if (load.clock_throttles > others_load.clock_throttles) return LateCause::hot_core;
  return LateCause::computation;
}

std::vector<LateRank> LateRankDetector::add(StepWindow window) {
  const auto count = hosts_.size();
  if (count < 2) return {};
  auto found = add_save(window);
  auto behind = behind_in(window, &RankTimes::own);
  for (auto& share : behind) share /= window.seconds;
  last_.push_back({std::move(window), std::move(behind)});
  if (last_.size() > windows) last_.pop_front();
  for (std::size_t rank = 0; rank < count; ++rank) {
    const auto late = late_count(rank);
    if (is_late_[rank]) {
      if (last_.size() == windows && late <= on_time_windows && !is_held_up(rank)) is_late_[rank] = false;
    } else if (late >= late_windows || is_held_up(rank)) {
      is_late_[rank] = true;
      found.push_back(describe(rank));
    }
  }
  return found;
}

std::vector<LateRank> LateRankDetector::add_save(const StepWindow& window) {
  seconds_since_save_ += window.seconds;
  if (std::ranges::all_of(window.times, [](const RankTimes& times) { return times.save <= 0; })) return {};
  last_saves_.push_back({seconds_since_save_, behind_in(window, &RankTimes::save)});
  seconds_since_save_ = 0;
  if (last_saves_.size() > windows) last_saves_.pop_front();
  std::vector<LateRank> found;
  for (std::size_t rank = 0; rank < hosts_.size(); ++rank) {
    const auto is_late_in = [&](const Save& save) {
      return save.behind[rank] > std::max(min_share_behind * save.seconds, min_seconds_behind_in_save);
    };
    const auto late = static_cast<std::size_t>(std::ranges::count_if(last_saves_, is_late_in));
    if (is_late_at_saves_[rank]) {
      if (last_saves_.size() == windows && late <= on_time_windows) is_late_at_saves_[rank] = false;
    } else if (late >= late_windows) {
      is_late_at_saves_[rank] = true;
      double seconds = 0, behind = 0;
      for (const auto& save : last_saves_)
        if (is_late_in(save)) seconds += save.seconds, behind += save.behind[rank];
      found.push_back({.rank = static_cast<int>(rank),
                       .host = hosts_[rank],
                       .cause = LateCause::saving,
                       .behind = behind / seconds});
    }
  }
  return found;
}

std::size_t LateRankDetector::late_count(std::size_t rank) const {
  return static_cast<std::size_t>(
      std::ranges::count_if(last_, [&](const Window& window) { return window.behind[rank] > min_share_behind; }));
}

/// True if the worker is late by the rule for the kernel's counters (see LateRankDetector).
bool LateRankDetector::is_held_up(std::size_t rank) const {
  if (last_.size() < windows) return false;
  double seconds = 0, behind = 0, throttled = 0, without_core = 0;
  for (const auto& [window, behind_of] : last_) {
    seconds += window.seconds;
    behind += behind_of[rank] * window.seconds;
    throttled += window.loads[rank].throttled - median_of_others(hosts_.size(), rank, [&](std::size_t other) {
                   return window.loads[other].throttled;
                 });
    without_core += window.loads[rank].run_queue;
  }
  if (behind <= min_share_behind * seconds) return false;
  const auto late = late_count(rank);
  return (late >= late_windows_by_quota && throttled >= behind / 2) ||
         (late >= late_windows_without_core && without_core >= behind / 2);
}

/// Describes the windows in which the worker was behind; all windows if it was behind in fewer than `late_windows`, and
/// so is late only by the rule for the kernel's counters.
LateRank LateRankDetector::describe(std::size_t rank) const {
  const bool in_bursts = late_count(rank) < late_windows;
  double seconds = 0, behind = 0;
  RankTimes own, others;
  RankLoad load, others_load;
  for (const auto& [window, behind_of] : last_) {
    if (behind_of[rank] <= min_share_behind && !in_bursts) continue;
    const auto of_others = [&](auto&& value) { return median_of_others(hosts_.size(), rank, value); };
    seconds += window.seconds;
    behind += behind_of[rank] * window.seconds;
    own.data += window.times[rank].data;
    others.data += of_others([&](std::size_t other) { return window.times[other].data; });
    load.read += window.loads[rank].read;
    others_load.read += of_others([&](std::size_t other) { return window.loads[other].read; });
    load.throttled += window.loads[rank].throttled;
    others_load.throttled += of_others([&](std::size_t other) { return window.loads[other].throttled; });
    load.run_queue += window.loads[rank].run_queue;
    load.other_threads += window.loads[rank].other_threads;
    others_load.other_threads += of_others([&](std::size_t other) { return window.loads[other].other_threads; });
    load.major_faults += window.loads[rank].major_faults;
    load.clock_throttles += window.loads[rank].clock_throttles;
    others_load.clock_throttles += static_cast<std::int64_t>(
        of_others([&](std::size_t other) { return static_cast<double>(window.loads[other].clock_throttles); }));
  }
  return {.rank = static_cast<int>(rank),
          .host = hosts_[rank],
          .cause = cause_of(behind, own, load, others, others_load),
          .behind = behind / seconds};
}

std::string text_of(const LateRank& late) {
  return str("the other ranks wait for rank ", late.rank, " (", late.host, "), for ", percent(late.behind), " of ",
             late.cause == LateCause::saving ? "the time" : "each step", ": ", words_of(late.cause).fact, ". ",
             words_of(late.cause).remedy);
}

std::string LateRankWarnings::line_about(const LateRank& late, Clock::time_point now) {
  // Other work on the machine may look like a longer computation, and slows one rank after the other.
  const bool by_machine = late.cause == LateCause::shared_core || late.cause == LateCause::computation;
  const std::tuple key(late.host, by_machine ? -1 : late.rank, by_machine ? LateCause::shared_core : late.cause);
  auto& topic = topics_.try_emplace(key, Topic{.rank = late.rank, .cause = late.cause}).first->second;
  const bool is_another = late.rank != topic.rank;
  const bool is_news = is_another && !topic.in_turn && topic.cause != LateCause::shared_core;
  if (now < topic.next && !is_news) return {};
  topic.next = now + topic.interval;
  topic.interval *= 2;
  if (!is_another) return text_of(late);
  topic.in_turn = true;
  return str("the ranks on ", late.host, " are late in turn, now rank ", late.rank, " for ", percent(late.behind),
             " of each step: the machine is shared with other processes. ", words_of(LateCause::shared_core).remedy);
}

}  // namespace muster::detail::observe
