// A rank's times at its last steps, in memory that all ranks of its node can read.
#pragma once

#include "watch/host_load.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace muster::detail::watch {

/// A rank's totals when a step begins. The difference of two samples is the time spent in the steps between them.
/// `load` is at most 20 ms old. `memory_bytes` is no total, and at most 1 s old.
struct StepSample {
  std::int64_t clock_ns = 0;                                             ///< the node's steady clock
  std::int64_t wait_ns = 0, data_ns = 0, save_ns = 0, save_wait_ns = 0;  ///< see TimeUse
  std::int64_t read_ns = 0;                                              ///< see file_read_time()
  HostLoad load = {};
  std::int64_t memory_bytes = 0;

  static constexpr std::size_t words = 12;
  std::array<std::int64_t, words> pack() const noexcept;
  static StepSample unpack(const std::array<std::int64_t, words>& values) noexcept;
};

/// The samples of the last steps. One thread writes; any process that maps the memory reads. All-zero memory is a valid
/// empty log.
class StepLog {
 public:
  static constexpr std::uint64_t slots = 64;

  /// `key`: identifies the step; not 0. Successive steps have successive keys.
  void write(std::uint64_t key, const StepSample& sample) noexcept;
  /// Returns the sample of that step if the log still holds it.
  std::optional<StepSample> read(std::uint64_t key) const noexcept;

 private:
  struct alignas(128) Slot {
    std::atomic<std::uint64_t> key;  ///< 0 while it is written
    std::array<std::atomic<std::int64_t>, StepSample::words> values;
  };
  std::array<Slot, slots> slots_;
};

}  // namespace muster::detail::watch
