#include "comm/environment.hpp"

#include "comm/channel.hpp"
#include "comm/mpi_call.hpp"

#include <mpi.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace muster::detail::comm {
namespace {

/// Open MPI looks for fast networks first, which takes longer than all the rest of a start. Within one node there is
/// none to find: what mpirun says of the job's size decides, and what the user has chosen stays.
void start_quickly_on_one_node() {
  const char* const ranks = std::getenv("OMPI_COMM_WORLD_SIZE");
  const char* const here = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  if (ranks != nullptr && here != nullptr && std::strcmp(ranks, here) == 0) ::setenv("OMPI_MCA_pml", "ob1", 0);
}

/// Open MPI copies large messages from process to process by a call of the kernel, which containers may forbid: it then
/// complains at each of them. Where the call is refused even among this process's own memory, messages go through
/// shared memory from the start; what the user has chosen stays.
void copy_twice_where_once_is_forbidden() {
  const char from = 1;
  char to = 0;
  const iovec local{&to, 1}, remote{const_cast<char*>(&from), 1};
  if (::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) < 0)
    ::setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0);
}

}  // namespace

Environment::Environment() {
  int initialised = 0;
  check(MPI_Initialized(&initialised), "MPI_Initialized");
  if (!initialised) {
    start_quickly_on_one_node();
    copy_twice_where_once_is_forbidden();
    int provided = 0;
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    initialised_here_ = true;
  }
  world_.emplace(make_world(MPI_COMM_WORLD));
}

Environment::~Environment() {
  world_.reset();
  int finalised = 0;
  MPI_Finalized(&finalised);
  if (initialised_here_ && !finalised) MPI_Finalize();
}

bool has_threads() noexcept {
  int provided = MPI_THREAD_SINGLE;
  return MPI_Query_thread(&provided) == MPI_SUCCESS && provided == MPI_THREAD_MULTIPLE;
}

void set_time_limit(const Communicator& communicator, std::chrono::milliseconds limit) {
  communicator.channel()->world->limit_ms = limit.count();
}

std::chrono::milliseconds time_limit(const Communicator& communicator) {
  return std::chrono::milliseconds(communicator.channel()->world->limit_ms.load());
}

void abort(int code) noexcept {
  MPI_Abort(MPI_COMM_WORLD, code);
  std::_Exit(code);
}

}  // namespace muster::detail::comm
