// Reproducible results.
#pragma once

#include <muster/detail/export.hpp>

#include <cstdint>

namespace muster {

/// From now on, torch uses deterministic algorithms: an operation that has none is an error, cuDNN does not choose its
/// algorithms by speed, and cuBLAS gets the workspace that it needs for this (CUBLAS_WORKSPACE_CONFIG, unless it is
/// set). Seeds torch's generators and std::rand, the same on every rank, so initialise your weights after this call.
/// torch's generators are seeded again when a training function begins. Without this call each rank has different
/// generators, seeded by --seed. In either case a run that continues restores the generators' states; at another number
/// of ranks it seeds them anew. (With virtual workers, each micro-batch always has generators of its own, seeded by the
/// run's seed.)
///
/// Call it before the first tensor is on a GPU, on all ranks, in main or at the beginning of the training function.
/// With several trainers call it in main: if the first run is finished, a start does not call its training function.
MUSTER_API void enable_reproducibility(std::uint64_t seed = 0);

}  // namespace muster
