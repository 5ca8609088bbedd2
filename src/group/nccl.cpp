// The only file that includes NCCL's headers.
#include "base/log.hpp"
#include "group/backends.hpp"
#include "muster/error.hpp"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/env.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <exception>
#include <utility>

namespace muster::detail::group {
namespace {

/// torch's NCCL backend, but its destructor aborts. torch's own warns unless it was shut down before; a shutdown would
/// wait for the other ranks, one of which may have failed.
class Nccl final : public c10d::ProcessGroupNCCL {
 public:
  using ProcessGroupNCCL::ProcessGroupNCCL;
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;
  ~Nccl() override {
    if (terminateProcessGroup_.load()) return;
    try {
      abort();
    } catch (const std::exception& error) {
      log::error(str("ending NCCL's connections: ", error.what()));
    }
  }
};

}  // namespace

bool has_nccl() noexcept { return true; }

c10::intrusive_ptr<c10d::Backend> make_nccl(const Communicator& communicator,
                                            const c10::intrusive_ptr<c10d::Store>& store,
                                            std::chrono::milliseconds timeout) {
  if (at::detail::getCUDAHooks().deviceCount() < 1)
    throw Error(ExitCode::data, "starting the process group", "NCCL moves tensors between GPUs and there is none here",
                "Run where there is a GPU, or use --backend mpi");
  // Otherwise a thread of each rank asks the store every second if another rank dumps its traces. If rank 0 has ended,
  // and the store with it, that thread would wait for an answer that does not come.
  c10::utils::set_env("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", /*overwrite=*/false);
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<Nccl>(store, communicator.rank(), communicator.size(), std::move(options));
}

}  // namespace muster::detail::group
