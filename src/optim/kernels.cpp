#include "optim/kernels.hpp"

#include "node/kernels.hpp"
#include "optim/kernels_table.hpp"

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

/// In eight sums, so that the additions need not wait for each other.
template <class T>
double squares(const T* values, std::size_t count) {
  double sums[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (std::size_t k = 0; k < 8; ++k)
      sums[k] += static_cast<double>(values[i + k]) * static_cast<double>(values[i + k]);
  for (; i < count; ++i) sums[0] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

}  // namespace

void update(const SgdRule& rule, const Tile<float>& tile) { kernels().sgd_float(rule, tile); }
void update(const SgdRule& rule, const Tile<double>& tile) { kernels().sgd_double(rule, tile); }
void update(const AdamRule& rule, const Tile<float>& tile) { kernels().adam_float(rule, tile); }
void update(const AdamRule& rule, const Tile<double>& tile) { kernels().adam_double(rule, tile); }

double sum_of_squares(const float* values, std::size_t count) { return squares(values, count); }
double sum_of_squares(const double* values, std::size_t count) { return squares(values, count); }

}  // namespace muster::detail::optim
