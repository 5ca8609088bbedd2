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
/// The number in OMP_NUM_THREADS, or the first number of a list; empty if it is not set or is no number from 1 to
/// most_threads.
MUSTER_INTERNAL_API std::optional<int> openmp_threads(const Environment& environment);

/// The CPUs on which this process may run, as a mask like cpu_mask()'s. If OpenMP binds threads, these are the CPUs of
/// all its places, since it has already bound the main thread to the first place when its library was loaded. Otherwise
/// these are the CPUs of the calling thread.
MUSTER_INTERNAL_API std::string process_mask();
/// Binds this process to process_mask(), so that the processes that it starts do not inherit OpenMP's binding.
MUSTER_INTERNAL_API void undo_openmp_binding();

}  // namespace muster::detail::launch
