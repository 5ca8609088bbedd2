// How the kernels of each instruction set are found.
#pragma once

#include "optim/kernels.hpp"

namespace muster::detail::optim {

struct UpdateKernels {
  void (*sgd_float)(const SgdRule&, const Tile<float>&);
  void (*sgd_double)(const SgdRule&, const Tile<double>&);
  void (*adam_float)(const AdamRule&, const Tile<float>&);
  void (*adam_double)(const AdamRule&, const Tile<double>&);
};

UpdateKernels portable_updates() noexcept;
#if defined(MUSTER_X86_KERNELS)
UpdateKernels avx2_updates() noexcept;
UpdateKernels avx512_updates() noexcept;
#endif

}  // namespace muster::detail::optim
