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

/// Returns the CPU, or with `use_gpu` the GPU that this rank uses. Throws an Error (ExitCode::data) if the node has no
/// GPU. Unless --bind is none, the process prefers a GPU that no other launch has claimed, claims it, and keeps it
/// until the process ends.
MUSTER_INTERNAL_API at::Device choose_device(bool use_gpu, const Launch& launch);
/// Warns if another launch has claimed the GPU of some rank. Collective.
MUSTER_INTERNAL_API void warn_of_shared_gpus(const Launch& launch);

/// Returns the index of the GPU that a process takes among `gpus`, the GPUs that it sees. The processes of a node are
/// distributed over the GPUs that are not `taken`; if all are taken, over all. `process_index`: see
/// Launch::local_process_index().
std::size_t choose_gpu(const std::vector<std::string>& gpus, const std::set<std::string>& taken, int process_index);
/// Returns the name of the GPU with this index among those of CUDA_VISIBLE_DEVICES; the index itself if the list is
/// shorter. `visible`: the variable's value; null if it is not set.
std::string gpu_in_list(const char* visible, int index);

}  // namespace muster::detail::run
