// The beginning and the end of MPI in this process.
#pragma once

#include "base/export.hpp"
#include "comm/wait.hpp"
#include "muster/communicator.hpp"
#include "muster/error.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <utility>

namespace muster::detail::comm {

/// Initialises MPI (MPI_THREAD_MULTIPLE) unless it is initialised already, and finalises it only if it has initialised
/// it. One per process.
class MpiScope {
 public:
  /// Waits for all ranks, up to `timeout`: see wait_for_world().
  MUSTER_INTERNAL_API explicit MpiScope(std::chrono::milliseconds timeout = default_timeout);
  MpiScope(const MpiScope&) = delete;
  MpiScope& operator=(const MpiScope&) = delete;
  MUSTER_INTERNAL_API ~MpiScope();

  /// All ranks of MPI_COMM_WORLD.
  const Communicator& world() const noexcept { return *world_; }
  /// True if MPI was initialised here, so that it ends with this object.
  bool owns_mpi() const noexcept { return initialised_here_; }
  /// Waits until all ranks have called it, for as long as that takes. Collective.
  void wait_for_all() const noexcept;

 private:
  bool initialised_here_ = false;
  std::optional<Communicator> world_;
};

/// Initialises MPI (MPI_THREAD_MULTIPLE) as quickly as this machine allows; false if that was done already. Does not
/// wait for other ranks.
MUSTER_INTERNAL_API bool initialise_mpi();
/// Finalises MPI, but not if this library may hang in it over several nodes. Call it if initialise_mpi() was true.
MUSTER_INTERNAL_API void finalise_mpi(bool on_one_node) noexcept;
/// This process's rank in MPI_COMM_WORLD, and the number of ranks there. Local.
MUSTER_INTERNAL_API std::pair<int, int> rank_and_size();
/// All ranks of MPI_COMM_WORLD. Collective.
MUSTER_INTERNAL_API Communicator world_of_mpi();
/// from_mpi() for the MPI communicator with that Fortran handle, as other languages pass communicators. Collective.
MUSTER_INTERNAL_API Communicator from_fortran_handle(int handle);

/// The name and version of the MPI library: "Open MPI v4.1.4".
MUSTER_INTERNAL_API std::string mpi_library();
/// The file of the MPI library that this process has loaded; empty if it is not known.
MUSTER_INTERNAL_API std::string mpi_library_file();

/// Ends all processes of MPI_COMM_WORLD with that exit code, as a last resort; in a child of fork(), this process
/// alone.
[[noreturn]] void abort(int code) noexcept;

/// Prints the error with this rank's number and host, and ends the job with the error's code.
[[noreturn]] void give_up(const Communicator& communicator, const Error& error) noexcept;

}  // namespace muster::detail::comm
