// MUSTER_INDEPENDENT_ITERATIONS before a loop: no iteration reads what another one writes, so the compiler may make
// vectors of it without asking whether arrays overlap.
#pragma once

#if defined(__clang__)
#define MUSTER_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define MUSTER_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif
