#include "watch/step_log.hpp"

namespace muster::detail::watch {

std::array<std::int64_t, StepSample::words> StepSample::pack() const noexcept {
  return {clock_ns,
          wait_ns,
          data_ns,
          save_ns,
          save_wait_ns,
          read_ns,
          load.run_queue_ns,
          load.other_threads_ns,
          load.throttled_ns,
          load.major_faults,
          load.clock_throttles,
          memory_bytes};
}

StepSample StepSample::unpack(const std::array<std::int64_t, words>& values) noexcept {
  const auto [clock, wait, data, save, save_wait, read, run_queue, other_threads, throttled, faults, throttles,
              memory] = values;
  return {.clock_ns = clock,
          .wait_ns = wait,
          .data_ns = data,
          .save_ns = save,
          .save_wait_ns = save_wait,
          .read_ns = read,
          .load = {.run_queue_ns = run_queue,
                   .other_threads_ns = other_threads,
                   .throttled_ns = throttled,
                   .major_faults = faults,
                   .clock_throttles = throttles},
          .memory_bytes = memory};
}

void StepLog::write(std::uint64_t key, const StepSample& sample) noexcept {
  using std::memory_order_relaxed;
  auto& slot = slots_[key % slots];
  slot.key.store(0, memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  const auto values = sample.pack();
  for (std::size_t i = 0; i < values.size(); ++i) slot.values[i].store(values[i], memory_order_relaxed);
  slot.key.store(key, std::memory_order_release);
}

std::optional<StepSample> StepLog::read(std::uint64_t key) const noexcept {
  using std::memory_order_relaxed;
  const auto& slot = slots_[key % slots];
  if (slot.key.load(std::memory_order_acquire) != key) return {};
  std::array<std::int64_t, StepSample::words> values{};
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = slot.values[i].load(memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (slot.key.load(memory_order_relaxed) != key) return {};
  return StepSample::unpack(values);
}

}  // namespace muster::detail::watch
