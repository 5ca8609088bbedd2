// The functions that return the kernels of each instruction set.
#pragma once

#include "muster/reduce_op.hpp"
#include "node/dtype.hpp"

#include <cstddef>

namespace muster::detail::node {

/// (targets, target count, sources, source count, elements, scale); see reduce_arrays() in kernels.hpp.
using ReduceArrays = void (*)(void* const*, std::size_t, const void* const*, std::size_t, std::size_t, double);

/// Null if the operation is not defined for the type.
ReduceArrays portable_kernel(Dtype type, ReduceOp op) noexcept;
#if defined(MUSTER_X86_KERNELS)
ReduceArrays avx2_kernel(Dtype type, ReduceOp op) noexcept;
ReduceArrays avx512_kernel(Dtype type, ReduceOp op) noexcept;
#elif defined(MUSTER_NEON_KERNELS)
ReduceArrays neon_kernel(Dtype type, ReduceOp op) noexcept;
#endif

}  // namespace muster::detail::node
