#include "node/kernels.hpp"

#include "node/kernels_table.hpp"

namespace muster::detail::node {

Isa best_isa() noexcept {
#if defined(MUSTER_X86_KERNELS)
  static const Isa best = [] {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      return Isa::avx512;
    // Every processor with AVX2 converts half types as well.
    return __builtin_cpu_supports("avx2") ? Isa::avx2 : Isa::portable;
  }();
  return best;
#else
  return Isa::portable;
#endif
}

bool is_reducible(Dtype type, ReduceOp op) noexcept { return portable_kernel(type, op) != nullptr; }

void reduce_arrays(std::span<void* const> targets, std::span<const void* const> sources, std::size_t count,
                   const Reduction& reduction, Isa isa) {
  auto find = portable_kernel;
#if defined(MUSTER_X86_KERNELS)
  if (isa == Isa::avx2) find = avx2_kernel;
  if (isa == Isa::avx512) find = avx512_kernel;
#else
  static_cast<void>(isa);
#endif
  find(reduction.type, reduction.op)(targets.data(), targets.size(), sources.data(), sources.size(), count,
                                     reduction.scale);
}

}  // namespace muster::detail::node
