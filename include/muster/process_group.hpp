// A torch process group made from an MPI communicator, on which existing code for c10d runs. It opens no ports, except
// with gloo or NCCL, whose ranks connect to each other. To use the returned pointer, include
// <torch/csrc/distributed/c10d/ProcessGroup.hpp>.
#pragma once

#include <muster/communicator.hpp>
#include <muster/detail/export.hpp>
#include <muster/json.hpp>

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace c10d {
class ProcessGroup;
}

namespace muster {

struct ProcessGroupOptions {
  /// The transport for tensors. "mpi" (muster's own) and "gloo" move GPU tensors by way of the CPU; "nccl" moves GPU
  /// tensors, and mpi all others. The transports may also be named by device, as in "cpu:gloo,cuda:nccl". "auto" is
  /// mpi.
  std::string backend = "auto";
  /// The timeout of every collective; empty: that of the communicator, which is the launch's in a launch.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// The largest number of elements in one MPI call; only for mpi.
  std::size_t chunk = std::size_t{1} << 30;
};

/// True if this build has the backend "mpi" (always), "gloo" (if gloo's headers were found) or "nccl" (if libtorch has
/// CUDA and NCCL).
MUSTER_API bool has_backend(std::string_view name);

/// Makes a process group over a duplicate of `communicator`, with the same ranks. Collective. Use it in one thread at a
/// time, with the same order of collectives on all ranks. Dense tensors of any type can be moved; reductions take
/// booleans, integers, floating-point and complex numbers, and allreduce() sums and averages sparse tensors, too. An
/// unsupported operation is an Error that says so, and so is a message whose length differs from what its receiver
/// expects. Resolve conjugate and negative views first (resolve_conj(), resolve_neg()): torch passes every group a copy
/// of such a tensor, and only the copy gets the result.
///
/// If gloo or NCCL is used, the ranks share the group's store (getStore()). With mpi alone they share none: each
/// function of the store throws an Error (ExitCode::usage).
///
/// gloo and NCCL bootstrap over MPI, which must have MPI_THREAD_MULTIPLE; a group with gloo or NCCL must be destroyed
/// before the launch. Which operations they support, and which errors these throw, is up to torch. Destroying a group
/// with NCCL aborts its operations, also on the other ranks: before that, wait for the GPU and then for the other
/// ranks.
MUSTER_API c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const Communicator& communicator,
                                                                     const ProcessGroupOptions& options = {});

}  // namespace muster
