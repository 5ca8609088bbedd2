#include "session/late_ranks.hpp"

#include "base/log.hpp"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <unistd.h>

#include <set>
#include <utility>

namespace muster::detail::session {
namespace {

constexpr double least_window_seconds = 0.02;
/// Longest interval between two samples, in steps. StepLog keeps twice as many steps.
constexpr std::int64_t longest_interval = 32;

double seconds(std::int64_t nanoseconds) { return 1e-9 * static_cast<double>(nanoseconds); }

/// Returns the IDs of the threads, except this one, among which torch divides an operation. It runs an operation of
/// libtorch to see them: at::parallel_for is a template, which in this file is compiled without OpenMP and uses one
/// thread.
std::vector<int> other_intraop_threads() {
  auto ids = at::full(at::get_num_threads(), ::gettid(), at::kInt);
  at::TensorIterator::nullary_op(ids).for_each(
      [](char** data, const std::int64_t* strides, std::int64_t count) {
        for (std::int64_t at = 0; at < count; ++at) *reinterpret_cast<int*>(data[0] + at * strides[0]) = ::gettid();
      },
      1);
  std::set<int> threads(ids.data_ptr<int>(), ids.data_ptr<int>() + ids.numel());
  threads.erase(::gettid());
  return {threads.begin(), threads.end()};
}

}  // namespace

LateRanks::LateRanks(const WorkerContext& workers, Outputs& outputs)
    : is_first_(workers.is_first()),
      outputs_(outputs),
      times_(workers.control),
      detector_(workers.control.topology().hosts) {}

void LateRanks::watch_intraop_threads() { times_.watch_threads(other_intraop_threads()); }

void LateRanks::begin_step(std::int64_t step) {
  times_.note(step);
  if (!is_first_) return;
  if (next_sample_ == 0) next_sample_ = (step / interval_ + 1) * interval_;
  if (step > next_sample_) end_window(step);
}

void LateRanks::end_window(std::int64_t step) {
  auto samples = times_.at(next_sample_);
  if (!samples) {
    // Some rank has not reached that step yet, or its node is slow to send.
    if (step - next_sample_ < longest_interval) return;
    begin_.reset();
    next_sample_ = (step / interval_ + 1) * interval_;
    return;
  }
  WorkerSamples end{next_sample_, std::move(*samples)};
  next_sample_ += interval_;
  if (begin_) {
    auto window = window_until(end);
    if (window.seconds < least_window_seconds) {
      if (interval_ == longest_interval) return;  // begin_ stays, so that the window gets longer
      interval_ *= 2;
      times_.set_interval(interval_);
      next_sample_ = (step / interval_ + 1) * interval_;
      return;
    }
    find_late(std::move(window));
  }
  begin_ = std::move(end);
}

observe::StepWindow LateRanks::window_until(const WorkerSamples& end) const {
  observe::StepWindow window{.steps = end.step - begin_->step,
                             .seconds = seconds(end.of_ranks[0].clock_ns - begin_->of_ranks[0].clock_ns)};
  for (std::size_t rank = 0; rank < end.of_ranks.size(); ++rank) {
    const auto& [after, before] = std::pair(end.of_ranks[rank], begin_->of_ranks[rank]);
    observe::RankTimes times{.wait = seconds(after.wait_ns - before.wait_ns),
                             .data = seconds(after.data_ns - before.data_ns),
                             .save = seconds(after.save_ns - before.save_ns)};
    times.compute = seconds(after.clock_ns - before.clock_ns) - times.wait - times.data - times.save -
                    seconds(after.save_wait_ns - before.save_wait_ns);
    window.times.push_back(times);
    window.loads.push_back({.read = seconds(after.read_ns - before.read_ns),
                            .run_queue = seconds(after.load.run_queue_ns - before.load.run_queue_ns),
                            .other_threads = seconds(after.load.other_threads_ns - before.load.other_threads_ns),
                            .throttled = seconds(after.load.throttled_ns - before.load.throttled_ns),
                            .major_faults = after.load.major_faults - before.load.major_faults,
                            .clock_throttles = after.load.clock_throttles - before.load.clock_throttles});
    window.memory_bytes.push_back(after.memory_bytes);
  }
  return window;
}

void LateRanks::find_late(observe::StepWindow window) {
  outputs_.observers.tell(&observe::Observer::step_window, window);
  for (const auto& late : detector_.add(std::move(window))) {
    if (const auto line = warnings_.line_about(late); !line.empty()) log::warn(line);
    found_.push_back(
        {{"rank", late.rank}, {"host", late.host}, {"cause", to_string(late.cause)}, {"behind", late.behind}});
    outputs_.observers.tell(&observe::Observer::late_rank, late);
  }
}

}  // namespace muster::detail::session
