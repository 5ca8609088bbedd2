#include "muster/process_group.hpp"
#include "muster/trainer.hpp"
#include "train/process_groups.hpp"
#include "train/session_state.hpp"

#include <ATen/Parallel.h>

namespace muster {

void TorchBackend::on_start(Session& session) {
  auto& state = *session.state_;
  const auto& flags = state.launch.flags();
  auto backend = flags.backend.value_or(config_.backend);
  if (backend == "auto" && state.device.is_cuda() && has_backend("nccl")) backend = "nccl";
  at::set_num_threads(
      flags.threads.value_or(state.scaling.threads_per_worker.value_or(state.launch.threads_per_rank())));
  const ProcessGroupOptions options{.backend = backend, .timeout = flags.timeout ? flags.timeout : config_.timeout};
  state.groups = std::make_shared<train::ProcessGroups>();
  state.groups->make = [workers = state.workers, options] { return make_process_group(workers, options); };
  state.groups->own = state.groups->make();
}

}  // namespace muster
