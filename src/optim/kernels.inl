// The body of the kernels, compiled once for each instruction set with MUSTER_ISA as the name. Everything is internal
// to the file that includes this, and no function of the standard library is called, so that no code for a newer
// processor is shared with other files. As in torch, constants are rounded to the type of the parameters.
#include "base/vectorize.hpp"
#include "optim/kernels.hpp"

namespace muster::detail::optim {
namespace {

inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }

double power(double base, long long exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

/// As in torch, adds nothing if there is no decay: 0 times an infinite parameter would be NaN.
template <bool decays, class T>
inline T decayed(T gradient, T decay, T parameter) {
  return decays ? gradient + decay * parameter : gradient;
}

template <class T, bool decays>
[[gnu::noinline]] void sgd_without_momentum(T lr, T decay, const Tile<T>& s) {
  const auto [g, from, to, v_from, v_to, count] = s;
  MUSTER_INDEPENDENT_ITERATIONS
  for (std::size_t i = 0; i < count; ++i) to[i] = from[i] - lr * decayed<decays>(g[i], decay, from[i]);
}

/// v = momentum v + keep g; p -= lr (v, or g + momentum v).
template <class T, bool decays, bool first, bool nesterov>
[[gnu::noinline]] void sgd_with_momentum(T lr, T decay, T momentum, T keep, const Tile<T>& s) {
  const auto [g, from, to, v_from, v_to, count] = s;
  MUSTER_INDEPENDENT_ITERATIONS
  for (std::size_t i = 0; i < count; ++i) {
    const T d = decayed<decays>(g[i], decay, from[i]);
    const T v = first ? d : momentum * v_from[0][i] + keep * d;
    v_to[0][i] = v;
    to[i] = from[i] - lr * (nesterov ? d + momentum * v : v);
  }
}

template <class T, bool decays>
void sgd_with_decay(const SgdRule& rule, const Tile<T>& s) {
  const T lr = static_cast<T>(rule.lr), decay = static_cast<T>(rule.weight_decay);
  const T momentum = static_cast<T>(rule.momentum), keep = static_cast<T>(1 - rule.dampening);
  if (rule.momentum == 0) return sgd_without_momentum<T, decays>(lr, decay, s);
  if (rule.first && rule.nesterov) return sgd_with_momentum<T, decays, true, true>(lr, decay, momentum, keep, s);
  if (rule.first) return sgd_with_momentum<T, decays, true, false>(lr, decay, momentum, keep, s);
  if (rule.nesterov) return sgd_with_momentum<T, decays, false, true>(lr, decay, momentum, keep, s);
  return sgd_with_momentum<T, decays, false, false>(lr, decay, momentum, keep, s);
}

template <class T>
void sgd(const SgdRule& rule, const Tile<T>& s) {
  return rule.weight_decay != 0 ? sgd_with_decay<T, true>(rule, s) : sgd_with_decay<T, false>(rule, s);
}

template <class T>
struct AdamConstants {
  T keep, decay, beta1, rest1, beta2, rest2, root_correction2, eps, step_size;
};

/// m = β₁ m + (1 - β₁) g; v = β₂ v + (1 - β₂) g²; p -= step_size · m / (√v / √(1 - β₂ᵗ) + ε).
template <class T, bool decays, bool first>
[[gnu::noinline]] void adam_tile(const AdamConstants<T>& c, const Tile<T>& s) {
  const auto [gradient, from, to, moments_from, moments_to, count] = s;
  MUSTER_INDEPENDENT_ITERATIONS
  for (std::size_t i = 0; i < count; ++i) {
    const T p = from[i] * c.keep;
    const T g = decayed<decays>(gradient[i], c.decay, from[i]);
    const T m = first ? c.rest1 * g : c.beta1 * moments_from[0][i] + c.rest1 * g;
    const T v = first ? c.rest2 * g * g : c.beta2 * moments_from[1][i] + c.rest2 * g * g;
    moments_to[0][i] = m;
    moments_to[1][i] = v;
    to[i] = p - c.step_size * (m / (root(v) / c.root_correction2 + c.eps));
  }
}

template <class T>
void adam(const AdamRule& rule, const Tile<T>& s) {
  const double correction1 = 1 - power(rule.beta1, rule.step), correction2 = 1 - power(rule.beta2, rule.step);
  const AdamConstants<T> constants{static_cast<T>(rule.decoupled ? 1 - rule.lr * rule.weight_decay : 1),
                                   static_cast<T>(rule.weight_decay),
                                   static_cast<T>(rule.beta1),
                                   static_cast<T>(1 - rule.beta1),
                                   static_cast<T>(rule.beta2),
                                   static_cast<T>(1 - rule.beta2),
                                   static_cast<T>(__builtin_sqrt(correction2)),
                                   static_cast<T>(rule.eps),
                                   static_cast<T>(rule.lr / correction1)};
  if (rule.weight_decay != 0 && !rule.decoupled)
    return rule.first ? adam_tile<T, true, true>(constants, s) : adam_tile<T, true, false>(constants, s);
  return rule.first ? adam_tile<T, false, true>(constants, s) : adam_tile<T, false, false>(constants, s);
}

}  // namespace

UpdateKernels MUSTER_ISA() noexcept { return {sgd<float>, sgd<double>, adam<float>, adam<double>}; }

}  // namespace muster::detail::optim
