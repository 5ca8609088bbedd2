#include "comm/mpi_call.hpp"

#include <array>

namespace muster::detail::comm {
namespace {

std::string text_of(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) return "MPI error " + std::to_string(code);
  return {text.data(), static_cast<std::size_t>(length)};
}

}  // namespace

MpiError::MpiError(int code, const char* call)
    : Error(ExitCode::retry, std::string("calling ") + call, text_of(code),
            "A rank or its node may be lost; start the job again"),
      mpi_code_(code) {}

}  // namespace muster::detail::comm
