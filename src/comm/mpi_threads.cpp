#include "comm/mpi_threads.hpp"

#include "comm/mpi_call.hpp"
#include "muster/error.hpp"

namespace muster::detail::comm {

void require_mpi(const char* doing) {
  int initialised = 0, finalised = 0;
  check(MPI_Initialized(&initialised), "MPI_Initialized");
  check(MPI_Finalized(&finalised), "MPI_Finalized");
  if (!initialised || finalised)
    throw Error(ExitCode::usage, doing, finalised ? "MPI is finalised already" : "MPI is not initialised yet",
                "Do it between MPI_Init_thread and MPI_Finalize");
  int level = MPI_THREAD_SINGLE, is_main = 0;
  check(MPI_Query_thread(&level), "MPI_Query_thread");
  check(MPI_Is_thread_main(&is_main), "MPI_Is_thread_main");
  if (level < MPI_THREAD_SERIALIZED && !is_main)
    throw Error(ExitCode::usage, doing, "MPI was initialised for its main thread alone, and this is another",
                "Do it on the main thread, or ask for MPI_THREAD_MULTIPLE in MPI_Init_thread");
}

bool mpi_is_initialised() noexcept {
  int initialised = 0;
  return MPI_Initialized(&initialised) == MPI_SUCCESS && initialised != 0;
}

bool mpi_is_finalised() noexcept {
  int finalised = 0;
  return MPI_Finalized(&finalised) == MPI_SUCCESS && finalised != 0;
}

void call_before_finalize(void (*call)()) {
  int key = MPI_KEYVAL_INVALID;
  const auto on_delete = [](MPI_Comm, int, void*, void* its_call) {
    reinterpret_cast<void (*)()>(its_call)();
    return MPI_SUCCESS;
  };
  // MPI_Finalize() first deletes the attributes of MPI_COMM_SELF.
  check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_delete, &key, reinterpret_cast<void*>(call)),
        "MPI_Comm_create_keyval");
  check(MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr), "MPI_Comm_set_attr");
}

bool threads_may_call_mpi() noexcept {
  int provided = MPI_THREAD_SINGLE;
  return MPI_Query_thread(&provided) == MPI_SUCCESS && provided == MPI_THREAD_MULTIPLE;
}

}  // namespace muster::detail::comm
