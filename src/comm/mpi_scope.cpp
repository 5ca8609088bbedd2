#include "comm/mpi_scope.hpp"

#include "base/log.hpp"
#include "base/supervisor_message.hpp"
#include "comm/channel.hpp"
#include "comm/mpi_call.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/progress.hpp"
#include "comm/wait_for_world.hpp"
#include "muster/mpi.hpp"

#include <dlfcn.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace muster::detail::comm {
namespace {

/// Open MPI first looks for fast networks, which takes longer than the rest of the start. If mpirun's variables say
/// that the whole job is on one node, this skips the search, unless the user has set OMPI_MCA_pml, or mpirun has
/// started several programs, which may choose different networks.
void start_quickly_on_one_node() {
  const char* const ranks = std::getenv("OMPI_COMM_WORLD_SIZE");
  const char* const here = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  if (ranks != nullptr && here != nullptr && std::strcmp(ranks, here) == 0 && !mpirun_has_several_programs())
    ::setenv("OMPI_MCA_pml", "ob1", 0);
}

/// Open MPI copies large messages between processes by a system call that containers may forbid; it then prints a
/// complaint for each message. If the kernel refuses the call even for this process's own memory, this function makes
/// messages go through shared memory from the start, unless the user has chosen a mechanism.
void avoid_forbidden_single_copy() {
  const char from = 1;
  char to = 0;
  const iovec local{&to, 1}, remote{const_cast<char*>(&from), 1};
  if (::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) < 0)
    ::setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0);
}

std::string library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  MPI_Get_library_version(text.data(), &length);
  return {text.data(), static_cast<std::size_t>(length)};
}

/// MPICH 4.0 and 4.1 over UCX: in MPI_Finalize, a rank that has closed its connections waits without answering ranks of
/// other nodes that still close theirs (pmodels/mpich, pull request 6596).
bool may_hang_in_finalize() {
  const auto library = library_version();
  const auto has = [&](const char* text) { return library.find(text) != std::string::npos; };
  return has("ch4:ucx") && (has("MPICH Version:\t4.0") || has("MPICH Version:\t4.1"));
}

}  // namespace

bool initialise_mpi() {
  if (mpi_is_initialised()) return false;
  start_quickly_on_one_node();
  avoid_forbidden_single_copy();
  tell(message_starting, "");
  int provided = 0;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  return_errors_of_tests();
  return true;
}

void finalise_mpi(bool on_one_node) noexcept {
  if (!mpi_is_finalised() && (on_one_node || !may_hang_in_finalize())) MPI_Finalize();
}

std::pair<int, int> rank_and_size() { return {rank_in(MPI_COMM_WORLD), size_in(MPI_COMM_WORLD)}; }

Communicator world_of_mpi() { return from_mpi(MPI_COMM_WORLD); }

Communicator from_fortran_handle(int handle) { return from_mpi(MPI_Comm_f2c(handle)); }

MpiScope::MpiScope(std::chrono::milliseconds timeout) : initialised_here_(initialise_mpi()) {
  wait_for_world(timeout);
  world_.emplace(world_of_mpi());
}

void MpiScope::wait_for_all() const noexcept { MPI_Barrier(MPI_COMM_WORLD); }

MpiScope::~MpiScope() {
  const bool on_one_node = world_->topology().num_nodes == 1;
  world_.reset();
  if (initialised_here_) finalise_mpi(on_one_node);
}

std::string mpi_library() {
  auto library = library_version();
  library.resize(std::min(library.find_first_of(",\n"), library.size()));
  std::ranges::replace(library, '\t', ' ');  // MPICH's version has tabs
  return library;
}

std::string mpi_library_file() {
  Dl_info found{};
  const bool known = ::dladdr(reinterpret_cast<const void*>(&MPI_Get_library_version), &found) != 0;
  return known && found.dli_fname != nullptr ? found.dli_fname : "";
}

void abort(int code) noexcept {
  if (!is_forked()) MPI_Abort(MPI_COMM_WORLD, code);
  std::_Exit(code);
}

void give_up(const Communicator& communicator, const Error& error) noexcept {
  const auto& channel = *Channel::of(communicator);
  const auto rank = channel.world_ranks[static_cast<std::size_t>(channel.rank)];
  // Not left to rank 0, which may be the rank that does not answer.
  std::fprintf(stderr, "muster: error: rank %d (%s): %s\n", rank,
               channel.world->placement.hosts[static_cast<std::size_t>(rank)].c_str(), error.what());
  if (!is_forked()) tell(message_leaving, std::to_string(static_cast<int>(error.code())));
  log::flush();
  abort(static_cast<int>(error.code()));
}

}  // namespace muster::detail::comm
