// What OpenMP's variables have set up in this process.
#pragma once

#include "base/export.hpp"
#include "launch/launcher.hpp"

#include <optional>
#include <string>

namespace muster::detail::launch {

/// The variable that makes OpenMP bind threads to cores: OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY; empty if none
/// is set, or OMP_PROC_BIND is false.
MUSTER_INTERNAL_API std::string openmp_binding(const Environment& environment);

inline constexpr int most_threads = 4096;  ///< about as many as a process can start
/// OMP_NUM_THREADS, the first number of a list; none if it is not set or no number of threads from 1 to most_threads.
MUSTER_INTERNAL_API std::optional<int> openmp_threads(const Environment& environment);

/// Where this process may run. OpenMP binds its main thread to the first of its places when the library is loaded,
/// before main(); then these are all places, and otherwise the CPUs of the calling thread. A mask as cpu_mask() returns
/// it.
MUSTER_INTERNAL_API std::string process_mask();
/// Binds this process to process_mask(), so that those that it starts do not inherit OpenMP's binding.
MUSTER_INTERNAL_API void undo_openmp_binding();

}  // namespace muster::detail::launch
