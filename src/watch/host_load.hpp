// Why a rank may be slow: what the kernel counts for the rank's computing threads, its process, its control group and
// its core.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <vector>

namespace muster::detail::watch {

/// Totals, each since a moment of its own: only differences between two readings of one HostLoadReader mean something.
/// 0 where the kernel does not tell.
struct HostLoad {
  std::int64_t run_queue_ns = 0;      ///< a watched thread was ready to run but had no core (schedstat in proc)
  std::int64_t other_threads_ns = 0;  ///< CPU time of the process's threads that are not watched, to about 10 ms
  std::int64_t throttled_ns = 0;      ///< the control group had used up its quota of processor time (cpu.stat)
  std::int64_t major_faults = 0;      ///< pages that had to be read from a disk or from swap (proc(5), stat)
  std::int64_t clock_throttles = 0;   ///< the core was slowed down because it was too hot (thermal_throttle in sysfs)
};

/// Reads HostLoad from the kernel's files, which stay open.
class HostLoadReader {
 public:
  /// `root` is the folder in which proc and sys are. Watches the thread on which it is constructed.
  explicit HostLoadReader(const std::filesystem::path& root = "/");
  ~HostLoadReader();
  HostLoadReader(const HostLoadReader&) = delete;
  HostLoadReader& operator=(const HostLoadReader&) = delete;

  /// Watches these threads of the process as well, from now on. An operation takes as long as the slowest thread, so
  /// from one reading to the next run_queue_ns grows by the longest time of any watched thread.
  void watch_threads(const std::vector<int>& threads);

  /// Takes some tens of microseconds at most. Call it on the thread on which this object was constructed.
  HostLoad read();

 private:
  struct Thread {
    int file = -1;                  ///< the thread's schedstat
    std::int64_t run_queue_ns = 0;  ///< total at the last reading
  };
  std::filesystem::path root_;
  std::vector<Thread> threads_;
  std::int64_t run_queue_ns_ = 0;
  int group_stat_ = -1, process_stat_ = -1, throttle_count_ = -1;  ///< open files
  int throttle_cpu_ = -1;                                          ///< the CPU that throttle_count_ belongs to
  std::int64_t throttles_before_ = 0;      ///< counted by earlier cores while the thread was on them
  std::int64_t throttles_on_arrival_ = 0;  ///< the current core's count when the thread came to it
};

/// The resident memory of this process in bytes; 0 if it is not known.
std::int64_t memory_bytes(const std::filesystem::path& root = "/");

}  // namespace muster::detail::watch
