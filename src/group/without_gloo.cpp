#include "group/backends.hpp"
#include "muster/error.hpp"

namespace muster::detail::group {

bool has_gloo() noexcept { return false; }

c10::intrusive_ptr<c10d::Backend> make_gloo(const Communicator&, const c10::intrusive_ptr<c10d::Store>&,
                                            std::chrono::milliseconds) {
  throw Error(ExitCode::usage, "starting the process group",
              "this muster has no gloo backend, since gloo's headers were not there when it was built",
              "Install libgloo-dev and build again, or use --backend mpi");
}

}  // namespace muster::detail::group
