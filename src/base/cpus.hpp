// The CPUs that this process may use: its mask, the cores of the machine and the quota of its control group. A mask is
// a text with a '1' at [cpu] for each CPU in it: "0011" for CPUs 2 and 3. `root` is the folder in which proc and sys
// are.
#pragma once

#include "base/export.hpp"

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

namespace muster::detail {

/// A core, and all or some of its CPUs (hardware threads). `number` is the number of the core's first CPU, even if
/// `cpus` lacks that CPU.
struct Core {
  int number = 0;
  std::vector<int> cpus;
};

/// The CPUs on which the calling thread, or the main thread of `process`, may run; "1" if the kernel does not tell.
MUSTER_INTERNAL_API std::string cpu_mask(pid_t process = 0);
/// Binds all threads of this process to `mask`; threads that start later inherit it. False if the kernel refuses it for
/// the calling thread; if it refuses it for another thread, that is ignored.
bool bind_threads(const std::string& mask);

/// Parses the kernel's lists of numbers, such as "0-3,8".
std::vector<int> parse_cpu_list(const std::string& list);
/// The mask that has these CPUs.
std::string mask_of(const std::vector<int>& cpus);

/// All cores of the machine that are online, neighbours together: in the order of packages, dies and cores. Empty if
/// the kernel does not tell.
MUSTER_INTERNAL_API std::vector<Core> cores_of_machine(const std::filesystem::path& root = "/");
/// The cores that have CPUs in `mask`, with only these CPUs. A CPU of `mask` that belongs to none of `cores` becomes a
/// core of its own.
std::vector<Core> cores_in(const std::string& mask, const std::vector<Core>& cores);

/// What the processor calls itself; empty if the kernel does not tell.
MUSTER_INTERNAL_API std::string cpu_model(const std::filesystem::path& root = "/");

/// How many CPUs this process's control group and its parents grant: the smallest quota; infinity if none sets one.
MUSTER_INTERNAL_API double cpu_quota(const std::filesystem::path& root = "/");

/// The number of ranks that can run on `mask` with a core for each: the number of its cores, but not more than the CPU
/// quota, rounded down; at least 1.
MUSTER_INTERNAL_API int count_usable_cores(const std::string& mask = cpu_mask(),
                                           const std::filesystem::path& root = "/");

}  // namespace muster::detail
