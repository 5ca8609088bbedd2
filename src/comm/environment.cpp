#include "comm/environment.hpp"

#include "comm/channel.hpp"
#include "comm/mpi_call.hpp"

#include <mpi.h>

#include <cstdlib>

namespace muster::comm {

Environment::Environment() {
  int initialised = 0;
  check(MPI_Initialized(&initialised), "MPI_Initialized");
  if (!initialised) {
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

}  // namespace muster::comm
