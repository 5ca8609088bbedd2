// c10d's reductions in terms of comm's: some come with a step before or after.
#pragma once

#include "comm/collectives.hpp"

#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string_view>

namespace c10d {
struct ReduceOp;
}

namespace muster::detail::group {

struct Reduction {
  ReduceOp op;
  std::optional<at::Scalar> factor = {};  ///< of PREMUL_SUM: every rank multiplies its part before the sum
  bool average = false;                   ///< the sum is divided by the number of ranks
};

/// An Error that begins with `doing` where the operation has no meaning for the type.
Reduction reduction_of(const c10d::ReduceOp& op, at::ScalarType type, std::string_view doing);

}  // namespace muster::detail::group
