// The one file that sees NCCL's headers.
#include "group/backends.hpp"
#include "muster/error.hpp"

#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <utility>

namespace muster::group {

bool has_nccl() noexcept { return true; }

c10::intrusive_ptr<c10d::Backend> make_nccl(const Communicator& communicator,
                                            const c10::intrusive_ptr<c10d::Store>& store,
                                            std::chrono::milliseconds timeout) {
  if (at::detail::getCUDAHooks().deviceCount() < 1)
    throw Error(ExitCode::data, "starting the process group", "NCCL moves tensors between GPUs and there is none here",
                "Run where there is a GPU, or use --backend mpi");
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, communicator.rank(), communicator.size(),
                                                     std::move(options));
}

}  // namespace muster::group
