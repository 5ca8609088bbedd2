// A torch process group from an MPI communicator, on its own: c10d code written elsewhere runs over it. No port is
// opened, unless gloo or NCCL is asked for, whose ranks connect to each other. Users of the returned pointer include
// <torch/csrc/distributed/c10d/ProcessGroup.hpp>.
#pragma once

#include <muster/communicator.hpp>
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
  /// What moves the tensors: "mpi" (muster's own) or "gloo", those of GPUs by way of the CPU; "nccl" those of GPUs, and
  /// mpi the others; or by device, as in "cpu:gloo,cuda:nccl". "auto" is mpi.
  std::string backend = "auto";
  /// The limit of every collective; the launch's unless given.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// Elements in one MPI call at the most; of mpi alone.
  std::size_t chunk = std::size_t{1} << 30;
};
void to_json(Json& json, const ProcessGroupOptions& options);
void from_json(const Json& json, ProcessGroupOptions& options);

/// Whether this build has the backend "mpi" (always), "gloo" (where gloo's headers were there) or "nccl" (where
/// libtorch came with CUDA and NCCL).
bool has_backend(std::string_view name);

/// A process group over a duplicate of `communicator`, rank for rank. Collective. Its operations are started and waited
/// for on one thread at a time, in the same order on all ranks. A dense tensor of any type may be moved; reductions
/// take booleans, integers, floating-point and complex numbers. Anything that cannot be done is an Error that says so;
/// so is a message of another length than its receiver expects. Resolve conjugate and negative views first
/// (resolve_conj(), resolve_neg()): torch hands every group a copy of them, which alone gets the result.
///
/// gloo and NCCL bootstrap over MPI, which must have MPI_THREAD_MULTIPLE; such a group must be gone before the launch
/// is. What they can do, and the errors of their operations, are torch's. A group with NCCL that goes cuts off its
/// operations, also for the other ranks: wait for the GPU and then for the ranks before.
c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const Communicator& communicator,
                                                          const ProcessGroupOptions& options = {});

}  // namespace muster
