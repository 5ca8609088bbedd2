#include "group/backends.hpp"
#include "muster/error.hpp"

namespace muster::detail::group {

bool has_nccl() noexcept { return false; }

c10::intrusive_ptr<c10d::Backend> make_nccl(const Communicator&, const c10::intrusive_ptr<c10d::Store>&,
                                            std::chrono::milliseconds) {
  throw Error(ExitCode::usage, "starting the process group",
              "this muster has no NCCL backend, since it was built with a libtorch without CUDA and NCCL",
              "Build it with a CUDA build of libtorch (Torch_DIR names one), or use --backend mpi");
}

}  // namespace muster::detail::group
