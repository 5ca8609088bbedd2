#include "comm/mpi_call.hpp"

#include "muster/error.hpp"

#include <array>
#include <string>

namespace muster::detail::comm {

void fail(int code, const char* call) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  const bool known = MPI_Error_string(code, text.data(), &length) == MPI_SUCCESS;
  throw Error(ExitCode::retry, std::string("calling ") + call,
              known ? text.data() : "MPI error " + std::to_string(code),
              "A rank or its node may be lost; start the job again");
}

int rank_in(MPI_Comm comm) {
  int rank = 0;
  check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  return rank;
}

int size_in(MPI_Comm comm) {
  int size = 1;
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  return size;
}

MPI_Comm duplicate(MPI_Comm comm) {
  MPI_Comm copy = MPI_COMM_NULL;
  check(MPI_Comm_dup(comm, &copy), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

}  // namespace muster::detail::comm
