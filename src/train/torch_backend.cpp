#include "muster/error.hpp"
#include "muster/process_group.hpp"
#include "muster/trainer.hpp"
#include "train/session_state.hpp"

#include <ATen/Parallel.h>

namespace muster {

void TorchBackend::on_start(Session& session) {
  auto& state = *session.state_;
  const auto& flags = state.launch.flags();
  const auto backend = flags.backend.value_or(config_.backend);
  if (backend == "gloo" || backend == "nccl")
    throw Error(ExitCode::usage, "starting the process group", "this build of muster has no " + backend + " backend",
                "Use --backend auto or mpi");
  if (backend != "auto" && backend != "mpi")
    throw Error(ExitCode::usage, "starting the process group", "there is no backend \"" + backend + "\"",
                "Use auto or mpi");
  at::set_num_threads(
      flags.threads.value_or(state.scaling.threads_per_worker.value_or(state.launch.threads_per_rank())));
  const ProcessGroupOptions options{.timeout = flags.timeout ? flags.timeout : config_.timeout};
  state.new_group = [workers = state.workers, options] { return make_process_group(workers, options); };
  state.group = state.new_group();
}

}  // namespace muster
