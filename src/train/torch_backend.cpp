#include "base/log.hpp"
#include "group/backends.hpp"
#include "muster/process_group.hpp"
#include "muster/trainer.hpp"

#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace muster {

void TorchBackend::on_start(Session& session) {
  const bool on_gpu = session.get_device().is_cuda();
  ProcessGroupOptions options{.backend = session.flags().backend.value_or(config_.backend)};
  if (on_gpu) options.backend = detail::group::on_gpus(options.backend, has_backend("nccl"));
  if (on_gpu && session.world_rank() == 0 && options.backend == "auto")
    detail::log::warn("this muster has no NCCL backend, so that tensors go from GPU to GPU by way of the CPU and MPI");
  session.set_process_group(
      [workers = session.communicator(), options] { return make_process_group(workers, options); });
}

void TorchBackend::on_shutdown(Session& session) {
  if (!session.get_device().is_cuda() || session.failed()) return;
  // A call of NCCL returns before the GPU has done it, and a group that goes cuts off what the other ranks still do.
  at::detail::getCUDAHooks().deviceSynchronize(session.get_device().index());
  session.barrier();
}

}  // namespace muster
