// The backend "muster" of torch.distributed: MpiBackend as Python's front end uses it.
#pragma once

#include "base/export.hpp"
#include "muster/communicator.hpp"

#include <c10/util/intrusive_ptr.h>

#include <chrono>

namespace c10d {
class Backend;
class ProcessGroup;
class Store;
}  // namespace c10d

namespace muster::detail::group {

/// Makes the backend. It does what the backend "mpi" of make_process_group() does, and differs in three things:
/// - An operation that fails throws torch's DistBackendError with the text of the muster::Error. Past the timeout
///   the text has the word "timeout" and names the late ranks. An Error about arguments stays a muster::Error, which is
///   a RuntimeError in Python.
/// - Operations that are not waited for at once advance, and their futures complete, without a call: by one thread for
///   all groups of the process (comm/progress.hpp). Below MPI_THREAD_MULTIPLE there is no such thread; a line in the
///   log says so once, and getFuture() waits.
/// - Several threads may start operations and call their Works; the order must be the same on all ranks.
///
/// `ranks` must serve this backend only: comm::make_subset() makes such a communicator. Local.
MUSTER_INTERNAL_API c10::intrusive_ptr<c10d::Backend> make_torch_backend(Communicator ranks,
                                                                         std::chrono::milliseconds timeout);

/// Returns a process group that has `backend` for tensors on the CPU: that of make_torch_backend(), or torch's debug
/// wrapper of it. torch's own ProcessGroup names every backend of a plug-in "custom", for example in DDP's logging, and
/// has no sequence numbers for it; this group says "muster" and has them. The function that creates a backend
/// (register_backend) may return this group instead, if the group needs no other backend, such as one for an
/// accelerator. Local.
MUSTER_INTERNAL_API c10::intrusive_ptr<c10d::ProcessGroup> make_torch_group(c10::intrusive_ptr<c10d::Store> store,
                                                                            c10::intrusive_ptr<c10d::Backend> backend);

}  // namespace muster::detail::group
