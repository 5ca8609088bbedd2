#include "base/log.hpp"
#include "group/backends.hpp"
#include "muster/process_group.hpp"
#include "muster/trainer.hpp"
#include "train/process_groups.hpp"
#include "train/session_state.hpp"

#include <ATen/detail/CUDAHooksInterface.h>

namespace muster {

void TorchBackend::on_start(Session& session) {
  auto& state = *session.state_;
  const auto& flags = state.launch.flags();
  auto backend = flags.backend.value_or(config_.backend);
  if (state.device.is_cuda()) backend = detail::group::on_gpus(backend, has_backend("nccl"));
  if (state.device.is_cuda() && state.root() && backend == "auto")
    detail::log::warn("this muster has no NCCL backend, so that tensors go from GPU to GPU by way of the CPU and MPI");
  const ProcessGroupOptions options{.backend = backend};
  state.groups = std::make_shared<detail::train::ProcessGroups>();
  state.groups->make = [workers = state.workers, options] { return make_process_group(workers, options); };
  state.groups->own = state.groups->make();
}

void TorchBackend::on_shutdown(Session& session) {
  auto& state = *session.state_;
  if (!state.device.is_cuda() || session.failed()) return;
  // A call of NCCL returns before the GPU has done it, and a group that goes cuts off what the other ranks still do.
  at::detail::getCUDAHooks().deviceSynchronize(state.device.index());
  state.control.barrier();
}

}  // namespace muster
