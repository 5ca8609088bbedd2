// Element-wise reductions over several arrays, with kernels chosen for the present processor.
#pragma once

#include "muster/reduce_op.hpp"
#include "node/dtype.hpp"

#include <cstddef>
#include <span>

namespace muster::detail::node {

/// The instruction set that a set of kernels was compiled for.
enum class Isa { portable, avx2, avx512, neon };

/// The instruction sets for which kernels were built and which this processor has, the best one last.
std::span<const Isa> usable_isas() noexcept;
inline Isa best_isa() noexcept { return usable_isas().back(); }

/// The type, the operation and the factor of a reduction.
struct Reduction {
  Dtype type = Dtype::f32;
  ReduceOp op = ReduceOp::sum;
  /// The result is multiplied by this; floating-point and complex types only.
  double scale = 1.0;
};

/// The number of operations.
inline constexpr std::size_t num_reduce_ops = static_cast<std::size_t>(ReduceOp::bit_xor) + 1;

/// True if the operation is defined for the type: no bit operations on floating-point numbers, no order of complex
/// numbers.
bool is_reducible(Dtype type, ReduceOp op) noexcept;

/// targets[t][i] = scale · (sources[0][i] op sources[1][i] op …), left to right, so that the result does not depend on
/// who computes it. Half types are reduced in float and rounded once, to nearest. If a source is NaN, so are min and
/// max. Integers wrap around. On booleans sum and max are or, product and min are and. A target may be a source.
void reduce_arrays(std::span<void* const> targets, std::span<const void* const> sources, std::size_t count,
                   const Reduction& reduction, Isa isa = best_isa());

}  // namespace muster::detail::node
