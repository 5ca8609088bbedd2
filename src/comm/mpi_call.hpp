// Checks for MPI's C calls, MPI's names for our element types, and our reductions as MPI operations.
#pragma once

#include "muster/reduce_op.hpp"
#include "node/dtype.hpp"

#include <mpi.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::comm {

/// Throws the Error for MPI's error `code`: ExitCode::user_error if a message was too long, otherwise ExitCode::retry.
[[noreturn]] void fail(int code, const char* call);

inline void check(int code, const char* call) {
  if (code != MPI_SUCCESS) fail(code, call);
}

/// Gives MPI_COMM_WORLD an error handler that lets test() return its errors. Its other errors end the program, as with
/// MPI's default handler. MPICH calls the handler of MPI_COMM_WORLD for the errors of any request.
void return_errors_of_tests();

/// Calls MPI_Test and returns its error code.
int test(MPI_Request& request, bool& completed, MPI_Status* status = MPI_STATUS_IGNORE) noexcept;

/// True if all requests have completed. A completed request becomes MPI_REQUEST_NULL, and its status is written;
/// `statuses` has one for each request, or is empty. If a request has failed, throws that request's Error; MPI_Testall
/// would only say that some request has failed.
bool test_all(std::span<MPI_Request> requests, std::span<MPI_Status> statuses = {});

/// A message that has come.
struct Letter {
  int from = 0;
  std::string bytes = {};
};
/// Receives the next message from that rank, or from any by MPI_ANY_SOURCE, if one has come. For short messages, which
/// MPI delivers without the sender's help; never waits.
std::optional<Letter> receive_letter(MPI_Comm comm, int from, int tag);

/// This process's rank in `comm`, and the size of `comm`.
int rank_in(MPI_Comm comm);
int size_in(MPI_Comm comm);
/// All ranks of `comm`: 0, 1, ….
std::vector<int> ranks_in(MPI_Comm comm);

/// A duplicate with MPI_ERRORS_RETURN. Collective.
MPI_Comm duplicate(MPI_Comm comm);

MPI_Datatype mpi_type(node::Dtype type);

/// The MPI operation for that type. It calls the same kernels as reductions in a node's shared memory
/// (node/kernels.hpp), so that both treat NaN, booleans and half types alike; but MPI chooses the order in which it
/// reduces. The operation must be defined for the type (node::is_reducible()).
MPI_Op mpi_op(ReduceOp op, node::Dtype type);

}  // namespace muster::detail::comm
