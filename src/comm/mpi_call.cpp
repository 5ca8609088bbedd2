#include "comm/mpi_call.hpp"

#include "base/text.hpp"
#include "muster/error.hpp"
#include "node/kernels.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace muster::detail::comm {
namespace {

using node::Dtype;

template <Dtype type, ReduceOp op>
void reduce(void* in, void* in_out, int* length, MPI_Datatype*) {
  const std::array<const void*, 2> sources{in, in_out};
  node::reduce_arrays(std::span(&in_out, 1), sources, static_cast<std::size_t>(*length), {.type = type, .op = op});
}

/// [types][operations]; never freed, like MPI's own operations.
template <std::size_t... i>
std::array<MPI_Op, sizeof...(i)> make_ops(std::index_sequence<i...>) {
  std::array<MPI_Op, sizeof...(i)> ops;
  const auto make = [](MPI_User_function* function) {
    MPI_Op op = MPI_OP_NULL;
    check(MPI_Op_create(function, 1, &op), "MPI_Op_create");
    return op;
  };
  ((ops[i] = make(&reduce<Dtype{i / node::num_reduce_ops}, ReduceOp{i % node::num_reduce_ops}>)), ...);
  return ops;
}

thread_local bool tests_request = false;

void handle_error(MPI_Comm* comm, int* code, ...) {
  if (tests_request) return;
  MPI_Comm_set_errhandler(*comm, MPI_ERRORS_ARE_FATAL);
  MPI_Comm_call_errhandler(*comm, *code);
}

}  // namespace

void return_errors_of_tests() {
  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  check(MPI_Comm_create_errhandler(handle_error, &handler), "MPI_Comm_create_errhandler");
  check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler), "MPI_Comm_set_errhandler");
  check(MPI_Errhandler_free(&handler), "MPI_Errhandler_free");
}

int test(MPI_Request& request, bool& completed, MPI_Status* status) noexcept {
  int flag = 0;
  tests_request = true;
  const int code = MPI_Test(&request, &flag, status);
  tests_request = false;
  completed = flag != 0;
  return code;
}

void fail(int code, const char* call) {
  int kind = MPI_SUCCESS;
  if (MPI_Error_class(code, &kind) == MPI_SUCCESS && kind == MPI_ERR_TRUNCATE)
    throw Error(ExitCode::user_error, str("calling ", call), "another rank's message is longer than the memory for it",
                "Give tensors of the same type and size on all ranks");
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  const bool known = MPI_Error_string(code, text.data(), &length) == MPI_SUCCESS;
  std::replace(text.begin(), text.end(), '\n', ' ');  // MPICH's text has several lines
  throw Error(ExitCode::retry, str("calling ", call), known ? text.data() : str("MPI error ", code),
              "A rank or its node may be lost; start the job again");
}

bool test_all(std::span<MPI_Request> requests, std::span<MPI_Status> statuses) {
  bool all = true;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (requests[i] == MPI_REQUEST_NULL) continue;
    bool completed = false;
    check(test(requests[i], completed, statuses.empty() ? MPI_STATUS_IGNORE : &statuses[i]), "MPI_Test");
    all = all && completed;
  }
  return all;
}

std::optional<Letter> receive_letter(MPI_Comm comm, int from, int tag) {
  int flag = 0, length = 0;
  MPI_Status status;
  check(MPI_Iprobe(from, tag, comm, &flag, &status), "MPI_Iprobe");
  if (!flag) return {};
  check(MPI_Get_count(&status, MPI_BYTE, &length), "MPI_Get_count");
  Letter letter{status.MPI_SOURCE, std::string(static_cast<std::size_t>(length), '\0')};
  check(MPI_Recv(letter.bytes.data(), length, MPI_BYTE, letter.from, tag, comm, MPI_STATUS_IGNORE), "MPI_Recv");
  return letter;
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

std::vector<int> ranks_in(MPI_Comm comm) {
  std::vector<int> ranks(static_cast<std::size_t>(size_in(comm)));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

MPI_Comm duplicate(MPI_Comm comm) {
  MPI_Comm copy = MPI_COMM_NULL;
  check(MPI_Comm_dup(comm, &copy), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

MPI_Datatype mpi_type(Dtype type) {
  // MPI has no 16-bit floating-point types; it carries their bits.
  const std::array names{MPI_UINT8_T,  MPI_INT8_T, MPI_INT16_T, MPI_INT32_T,         MPI_INT64_T,          MPI_UINT16_T,
                         MPI_UINT16_T, MPI_FLOAT,  MPI_DOUBLE,  MPI_C_FLOAT_COMPLEX, MPI_C_DOUBLE_COMPLEX, MPI_C_BOOL};
  static_assert(std::tuple_size_v<decltype(names)> == node::num_dtypes);
  return names[static_cast<std::size_t>(type)];
}

MPI_Op mpi_op(ReduceOp op, Dtype type) {
  static const auto ops = make_ops(std::make_index_sequence<node::num_dtypes * node::num_reduce_ops>());
  return ops[static_cast<std::size_t>(type) * node::num_reduce_ops + static_cast<std::size_t>(op)];
}

}  // namespace muster::detail::comm
