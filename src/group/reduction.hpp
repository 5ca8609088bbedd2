// Translates c10d's reductions to those of `comm/`. PREMUL_SUM needs a step before the reduction, and AVG one after it.
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
  std::optional<at::Scalar> factor = {};  ///< for PREMUL_SUM: every rank multiplies its part by it before the sum
  bool average = false;                   ///< true if the sum is divided by the number of ranks
};

/// Throws an Error that begins with `doing` if the operation has no meaning for the type.
Reduction reduction_of(const c10d::ReduceOp& op, at::ScalarType type, std::string_view doing);

}  // namespace muster::detail::group
