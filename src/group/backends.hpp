// The backends that move tensors between the ranks: the choice of a backend for each device, and torch's own backends.
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

/// The name of the backend for each device.
struct BackendChoice {
  std::string cpu = "mpi";
  std::string cuda = "mpi";
};

/// Reads "auto", "mpi" or "gloo" (for all devices), "nccl" (for GPUs), or a list such as "cpu:gloo,cuda:nccl". Devices
/// that are not named keep the default. Throws an Error (ExitCode::usage) for anything else.
BackendChoice parse_backends(std::string_view text);

/// Returns `text`, a choice for parse_backends(), for training on GPUs: adds NCCL for GPUs if the text names no backend
/// for them and `has_nccl` is true.
std::string backends_for_gpus(std::string_view text, bool has_nccl);

/// Makes the gloo backend, for tensors on the CPU, and on GPUs with a copy through the CPU. The ranks connect by TCP:
/// over loopback if all are on one node, else from the address of this host or of the interface GLOO_SOCKET_IFNAME.
/// Throws an Error (ExitCode::usage) if muster was built without gloo's headers. Collective.
c10::intrusive_ptr<c10d::Backend> make_gloo(const Communicator& communicator,
                                            const c10::intrusive_ptr<c10d::Store>& store,
                                            std::chrono::milliseconds timeout);
bool has_gloo() noexcept;

/// Makes the NCCL backend, for tensors on GPUs. The ranks connect at the first collective. Throws an Error
/// (ExitCode::usage) if muster was built with a libtorch without NCCL; ExitCode::data if there is no GPU.
c10::intrusive_ptr<c10d::Backend> make_nccl(const Communicator& communicator,
                                            const c10::intrusive_ptr<c10d::Store>& store,
                                            std::chrono::milliseconds timeout);
bool has_nccl() noexcept;

}  // namespace muster::detail::group
