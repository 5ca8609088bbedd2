// The device of a rank.
#pragma once

#include "base/export.hpp"

#include <c10/core/Device.h>

#include <cstddef>
#include <set>
#include <string>
#include <vector>

namespace muster {
class Launch;
}

namespace muster::detail::run {

/// The CPU, or with `use_gpu` this rank's GPU of its node. Throws an Error (ExitCode::data) if the node has no GPU. The
/// process claims the GPU and keeps it to its end; of those that it sees it takes one that no other launch has claimed,
/// if there is one.
MUSTER_INTERNAL_API at::Device choose_device(bool use_gpu, const Launch& launch);
/// Warns on rank 0 if another launch has claimed the GPU of a rank, too. Collective.
MUSTER_INTERNAL_API void warn_of_shared_gpus(const Launch& launch);

/// Which of `gpus`, those that a rank sees, it takes: the ranks of a node go round those that are not `taken`, or round
/// all if all are. `process_index`: see Launch::local_process_index().
std::size_t choose_gpu(const std::vector<std::string>& gpus, const std::set<std::string>& taken, int process_index);
/// The name of the GPU that has `index` among those of CUDA_VISIBLE_DEVICES, whose value is `visible`; null: not set.
std::string gpu_in_list(const char* visible, int index);

}  // namespace muster::detail::run
