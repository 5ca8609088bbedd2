// The arithmetic of torch's optimizers on arrays, by kernels for the processor that runs them.
#pragma once

#include <cstddef>

namespace muster::detail::optim {

// state_tensor_count() of a rule: how many state tensors a step by it writes.

/// One step of SGD with momentum (torch.optim.SGD).
struct SgdRule {
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  bool first = false;  ///< true if there is no momentum yet
  std::size_t state_tensor_count() const noexcept { return momentum != 0 ? 1 : 0; }
};

/// One step of Adam (Kingma and Ba 2015), or of AdamW (Loshchilov and Hutter 2019) with decoupled decay.
struct AdamRule {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  bool decoupled = false;
  bool first = false;  ///< true if there are no moments yet
  long long step = 1;  ///< number of this step, from 1
  std::size_t state_tensor_count() const noexcept { return 2; }
};

/// The arrays of one tile of parameters. An array that is written may be the same memory as the array that is read.
template <class T>
struct Tile {
  const T* gradient = nullptr;
  const T* from = nullptr;  ///< the parameters' values
  T* to = nullptr;
  const T* state_from[2] = {};  ///< the momentum, or the two moments; not read in the first step
  T* state_to[2] = {};
  std::size_t count = 0;
};

void update(const SgdRule& rule, const Tile<float>& tile);
void update(const SgdRule& rule, const Tile<double>& tile);
void update(const AdamRule& rule, const Tile<float>& tile);
void update(const AdamRule& rule, const Tile<double>& tile);

/// The kernels of one instruction set.
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
