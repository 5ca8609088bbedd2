#include "node/kernels.hpp"

#include "node/kernels_table.hpp"

#include <array>

namespace muster::detail::node {

std::span<const Isa> usable_isas() noexcept {
#if defined(MUSTER_X86_KERNELS)
  static constexpr std::array all{Isa::portable, Isa::avx2, Isa::avx512};
  static const std::size_t count = [] {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      return 3;
    // Every processor with AVX2 converts half types as well.
    return __builtin_cpu_supports("avx2") ? 2 : 1;
  }();
  return std::span(all).first(count);
#elif defined(MUSTER_NEON_KERNELS)
  static constexpr std::array all{Isa::portable, Isa::neon};  // every 64-bit ARM processor has NEON
  return all;
#else
  static constexpr std::array all{Isa::portable};
  return all;
#endif
}

bool is_reducible(Dtype type, ReduceOp op) noexcept { return portable_kernel(type, op) != nullptr; }

void reduce_arrays(std::span<void* const> targets, std::span<const void* const> sources, std::size_t count,
                   const Reduction& reduction, Isa isa) {
  auto find = portable_kernel;
#if defined(MUSTER_X86_KERNELS)
  if (isa == Isa::avx2) find = avx2_kernel;
  if (isa == Isa::avx512) find = avx512_kernel;
#elif defined(MUSTER_NEON_KERNELS)
  if (isa == Isa::neon) find = neon_kernel;
#else
  static_cast<void>(isa);
#endif
  find(reduction.type, reduction.op)(targets.data(), targets.size(), sources.data(), sources.size(), count,
                                     reduction.scale);
}

}  // namespace muster::detail::node
