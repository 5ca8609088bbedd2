// The kernels, compiled once for each instruction set; MUSTER_ISA is the name of the resulting function. Everything
// else has internal linkage, so that the linker cannot use code for a newer processor in the rest of the program. For
// the same reason nothing of the standard library but memcpy() is called here. The loops are in functions that are not
// inlined. Their arrays do not overlap, or their iterations are marked as independent, so that the compiler vectorises
// them.

#include "base/vectorize.hpp"
#include "node/kernels_table.hpp"

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(MUSTER_NEON)
#include <arm_neon.h>
#endif

namespace muster::detail::node {
namespace {

constexpr std::size_t block = 1024;  ///< elements reduced at once; a block stays in the L1 cache

struct Half {
  std::uint16_t bits;
};
struct Bfloat {
  std::uint16_t bits;
};
struct Bool {
  std::uint8_t bits;
};
template <class T>
struct Complex {
  T re, im;
};

/// The type in which elements are reduced.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, Half> || std::is_same_v<T, Bfloat>, float, T>;

inline std::uint32_t bits_of(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}
inline float float_of(std::uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

inline float widen(Bfloat x) { return float_of(std::uint32_t{x.bits} << 16); }
template <class T>
T narrow(float x);
template <>
inline Bfloat narrow(float x) {
  const std::uint32_t u = bits_of(x);
  const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (u >> 16) | 0x40u;
  return {static_cast<std::uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
}

// IEEE 754 binary16: 5 bits of exponent with bias 15, 10 of fraction.
inline float widen(Half x) {
  const std::uint32_t sign = std::uint32_t{x.bits & 0x8000u} << 16;
  const std::uint32_t rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest >= 0x400u) return float_of(sign | ((rest << 13) + 0x38000000u));
  const float tiny = static_cast<float>(rest) * 0x1p-24f;
  return float_of(sign | bits_of(tiny));
}
template <>
inline Half narrow(float x) {
  const std::uint32_t u = bits_of(x);
  const std::uint32_t sign = (u >> 16) & 0x8000u;
  const std::uint32_t rest = u & 0x7fffffffu;
  if (rest > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u | ((rest >> 13) & 0x3ffu))};
  if (rest >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // rounds past 65504
  if (rest < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the rounded fraction in the lowest bits.
    const std::uint32_t shifted = bits_of(float_of(rest) + 0.5f) - 0x3f000000u;
    return {static_cast<std::uint16_t>(sign | shifted)};
  }
  const std::uint32_t rounded = rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | (rounded >> 13))};
}

// Convert arrays to the wide type and back.
template <class T>
[[gnu::noinline]] void load(Wide<T>* __restrict wide, const T* __restrict from, std::size_t n) {
  std::size_t i = 0;
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, Half>)
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#elif defined(MUSTER_NEON)
  if constexpr (std::is_same_v<T, Half>)
    for (; i + 4 <= n; i += 4)
      vst1q_f32(wide + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(from + i)))));
#endif
  for (; i < n; ++i) {
    if constexpr (sizeof(Wide<T>) == sizeof(T))
      wide[i] = from[i];
    else
      wide[i] = widen(from[i]);
  }
}
template <class T>
[[gnu::noinline]] void store(T* __restrict to, const Wide<T>* __restrict wide, std::size_t n) {
  if constexpr (sizeof(Wide<T>) == sizeof(T)) {
    std::memcpy(static_cast<void*>(to), wide, n * sizeof(T));
  } else {
    std::size_t i = 0;
#if defined(__F16C__)
    if constexpr (std::is_same_v<T, Half>)
      for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(wide + i), 0));
#elif defined(MUSTER_NEON)
    if constexpr (std::is_same_v<T, Half>)
      for (; i + 4 <= n; i += 4)
        vst1_u16(reinterpret_cast<std::uint16_t*>(to + i), vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(wide + i))));
#endif
    for (; i < n; ++i) to[i] = narrow<T>(wide[i]);
  }
}

template <class T>
using Unsigned =
    typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
  }
  static Bool apply(Bool a, Bool b) { return {static_cast<std::uint8_t>((a.bits | b.bits) != 0)}; }
  template <class T>
  static Complex<T> apply(Complex<T> a, Complex<T> b) {
    return {a.re + b.re, a.im + b.im};
  }
};
struct Product {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(static_cast<Unsigned<T>>(a) * Unsigned<T>{1} * static_cast<Unsigned<T>>(b));
  }
  // In 32 bits: 16-bit unsigned factors would be promoted to int, whose overflow is undefined.
  static std::int16_t apply(std::int16_t a, std::int16_t b) {
    return static_cast<std::int16_t>(std::uint32_t{static_cast<std::uint16_t>(a)} * static_cast<std::uint16_t>(b));
  }
  static Bool apply(Bool a, Bool b) { return {static_cast<std::uint8_t>(a.bits != 0 && b.bits != 0)}; }
  template <class T>
  static Complex<T> apply(Complex<T> a, Complex<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return (a < b || a != a) ? a : b;
  }
  static Bool apply(Bool a, Bool b) { return Product::apply(a, b); }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return (a > b || a != a) ? a : b;
  }
  static Bool apply(Bool a, Bool b) { return Sum::apply(a, b); }
};
struct And {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
  static Bool apply(Bool a, Bool b) { return Product::apply(a, b); }
};
struct Or {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
  static Bool apply(Bool a, Bool b) { return Sum::apply(a, b); }
};
struct Xor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
  static Bool apply(Bool a, Bool b) { return {static_cast<std::uint8_t>((a.bits != 0) != (b.bits != 0))}; }
};

template <class Op, class T>
[[gnu::noinline]] void combine(T* __restrict result, const T* __restrict a, const T* __restrict b, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) result[i] = Op::apply(a[i], b[i]);
}
template <class Op, class T>
[[gnu::noinline]] void accumulate(T* __restrict result, const T* __restrict b, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) result[i] = Op::apply(result[i], b[i]);
}

template <class T>
[[gnu::noinline]] void scale_by(T* __restrict values, double factor, std::size_t n) {
  if constexpr (std::is_floating_point_v<T>)  // integers are not scaled
    for (std::size_t i = 0; i < n; ++i) values[i] *= static_cast<T>(factor);
}
template <class T>
[[gnu::noinline]] void scale_by(Complex<T>* __restrict values, double factor, std::size_t n) {
  const auto by = static_cast<T>(factor);
  for (std::size_t i = 0; i < n; ++i) values[i] = {values[i].re * by, values[i].im * by};
}

/// The most common case in one loop: two sources, and one or two targets.
template <class Op, class T>
[[gnu::noinline]] void reduce_two(T* to, T* also, const T* a, const T* b, T factor, std::size_t n) {
  MUSTER_INDEPENDENT_ITERATIONS
  for (std::size_t i = 0; i < n; ++i) {
    const T result = Op::apply(a[i], b[i]) * factor;
    to[i] = result;
    also[i] = result;
  }
}

template <class Op, class T>
void reduce_blocks(void* const* targets, std::size_t target_count, const void* const* sources, std::size_t source_count,
                   std::size_t count, double scale) {
  if constexpr (std::is_floating_point_v<T>) {
    if (source_count == 2 && target_count <= 2)
      return reduce_two<Op>(static_cast<T*>(targets[0]), static_cast<T*>(targets[target_count - 1]),
                            static_cast<const T*>(sources[0]), static_cast<const T*>(sources[1]),
                            static_cast<T>(scale), count);
  }
  alignas(64) Wide<T> result[block];
  for (std::size_t first = 0; first < count; first += block) {
    const std::size_t n = count - first < block ? count - first : block;
    const auto source = [&](std::size_t s) { return static_cast<const T*>(sources[s]) + first; };
    std::size_t s = 1;
    if constexpr (sizeof(Wide<T>) == sizeof(T)) {
      if (source_count > 1) {
        combine<Op>(result, source(0), source(1), n);
        s = 2;
      } else {
        load(result, source(0), n);
      }
      for (; s < source_count; ++s) accumulate<Op>(result, source(s), n);
    } else {
      alignas(64) Wide<T> next[block];
      load<T>(result, source(0), n);
      for (; s < source_count; ++s) {
        load<T>(next, source(s), n);
        accumulate<Op>(result, next, n);
      }
    }
    if (scale != 1.0) scale_by(result, scale, n);
    for (std::size_t t = 0; t < target_count; ++t) store(static_cast<T*>(targets[t]) + first, result, n);
  }
}

/// Returns the kernel of `op`; null if it is none of `Op`, the first operations of ReduceOp.
template <class T, class... Op>
ReduceArrays one_of(ReduceOp op) noexcept {
  constexpr ReduceArrays kernels[] = {reduce_blocks<Op, T>...};
  const auto number = static_cast<std::size_t>(op);
  return number < sizeof...(Op) ? kernels[number] : nullptr;
}
template <class T>
constexpr auto of_number = one_of<T, Sum, Product, Min, Max>;
template <class T>
constexpr auto of_bits = one_of<T, Sum, Product, Min, Max, And, Or, Xor>;
template <class T>
constexpr auto of_complex = one_of<Complex<T>, Sum, Product>;

}  // namespace

ReduceArrays MUSTER_ISA(Dtype type, ReduceOp op) noexcept {
  constexpr ReduceArrays (*of_type[])(ReduceOp) noexcept = {
      of_bits<std::uint8_t>, of_bits<std::int8_t>, of_bits<std::int16_t>, of_bits<std::int32_t>, of_bits<std::int64_t>,
      of_number<Half>,       of_number<Bfloat>,    of_number<float>,      of_number<double>,     of_complex<float>,
      of_complex<double>,    of_bits<Bool>,
  };
  static_assert(sizeof of_type == num_dtypes * sizeof *of_type);
  return of_type[static_cast<std::size_t>(type)](op);
}

}  // namespace muster::detail::node
