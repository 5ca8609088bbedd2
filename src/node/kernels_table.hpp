// How the kernels of each instruction set are found.
#pragma once

#include "muster/reduce_op.hpp"
#include "node/dtype.hpp"

#include <cstddef>

namespace muster::detail::node {

/// (targets, their number, sources, their number, elements, scale), as reduce_arrays() of kernels.hpp.
using ReduceArrays = void (*)(void* const*, std::size_t, const void* const*, std::size_t, std::size_t, double);

/// Null where the operation has no meaning for the type.
ReduceArrays portable_kernel(Dtype type, ReduceOp op) noexcept;
#if defined(MUSTER_X86_KERNELS)
ReduceArrays avx2_kernel(Dtype type, ReduceOp op) noexcept;
ReduceArrays avx512_kernel(Dtype type, ReduceOp op) noexcept;
#endif

}  // namespace muster::detail::node
