#include "optim/kernels.hpp"

#include "node/kernels.hpp"

namespace muster::detail::optim {
namespace {

const UpdateKernels& kernels() {
  static const UpdateKernels chosen = [] {
#if defined(MUSTER_X86_KERNELS)
    if (node::best_isa() == node::Isa::avx512) return avx512_updates();
    if (node::best_isa() == node::Isa::avx2) return avx2_updates();
#endif
    return portable_updates();
  }();
  return chosen;
}

}  // namespace

void update(const SgdRule& rule, const Tile<float>& tile) { kernels().sgd_float(rule, tile); }
void update(const SgdRule& rule, const Tile<double>& tile) { kernels().sgd_double(rule, tile); }
void update(const AdamRule& rule, const Tile<float>& tile) { kernels().adam_float(rule, tile); }
void update(const AdamRule& rule, const Tile<double>& tile) { kernels().adam_double(rule, tile); }

}  // namespace muster::detail::optim
