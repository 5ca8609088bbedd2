// MUSTER_INDEPENDENT_ITERATIONS before a loop promises that no iteration reads what another one writes, so that the
// compiler may vectorise it without checking whether arrays overlap.
#pragma once

#if defined(__clang__)
#define MUSTER_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define MUSTER_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif
