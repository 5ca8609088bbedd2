// The backends that move tensors between the ranks: which of them a device gets, and those that torch brings itself.
#pragma once

#include "muster/communicator.hpp"

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>
#include <string_view>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace muster::detail::group {

/// The names of backends by device.
struct Choice {
  std::string cpu = "mpi";
  std::string cuda = "mpi";
};

/// Reads "auto", "mpi" or "gloo" (for all devices), "nccl" (for GPUs), or a list as "cpu:gloo,cuda:nccl". Devices that
/// are not named keep the default. An Error (ExitCode::usage) for anything else.
Choice choose(std::string_view text);

/// The same choice for a training on GPUs: where it says nothing of them, NCCL if this build has it.
std::string on_gpus(std::string_view text, bool has_nccl);

/// gloo, for tensors on the CPU, and on GPUs by way of it. The ranks connect to each other by TCP: over loopback where
/// all are on one node, else from the address of this host or of the interface GLOO_SOCKET_IFNAME. Collective.
///
/// An Error (ExitCode::usage) where gloo's headers were not there when muster was built.
c10::intrusive_ptr<c10d::Backend> make_gloo(const Communicator& communicator,
                                            const c10::intrusive_ptr<c10d::Store>& store,
                                            std::chrono::milliseconds timeout);
bool has_gloo() noexcept;

/// NCCL, for tensors on GPUs. The ranks connect at the first collective.
///
/// An Error (ExitCode::usage) where libtorch came without NCCL when muster was built; ExitCode::data without a GPU.
c10::intrusive_ptr<c10d::Backend> make_nccl(const Communicator& communicator,
                                            const c10::intrusive_ptr<c10d::Store>& store,
                                            std::chrono::milliseconds timeout);
bool has_nccl() noexcept;

}  // namespace muster::detail::group
