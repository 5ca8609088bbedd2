// The same numbers from the same program.
#pragma once

#include <cstdint>

namespace muster {

/// Torch computes by deterministic algorithms from now on, an operation that has none is an error, cuDNN does not try
/// which of its algorithms is quickest, and cuBLAS gets the workspace that it needs for that
/// (CUBLAS_WORKSPACE_CONFIG, unless it is set). Torch's generators and std::rand are seeded, alike on every rank: draw
/// weights of your own after it. Torch's are so again when a training function begins. Without it each rank has
/// generators of its own, by --seed; a run that is taken up again has theirs back in either case, or at another number
/// of ranks new ones. (Virtual workers draw from their own in any case.)
///
/// To be called before the first tensor is on a GPU, on all ranks, in main or first of all in the training function.
/// With several trainers call it in main: a start that finds the first one finished does not run its function.
void enable_reproducibility(std::uint64_t seed = 0);

}  // namespace muster
