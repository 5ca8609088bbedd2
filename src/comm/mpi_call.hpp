// MPI's C calls, checked in one place.
#pragma once

#include "muster/error.hpp"

#include <mpi.h>

#include <string>

namespace muster::detail::comm {

/// An MPI call failed; the code is kept.
class MpiError : public Error {
 public:
  MpiError(int code, const char* call);
  int mpi_code() const noexcept { return mpi_code_; }

 private:
  int mpi_code_;
};

inline void check(int code, const char* call) {
  if (code != MPI_SUCCESS) throw MpiError(code, call);
}

}  // namespace muster::detail::comm
