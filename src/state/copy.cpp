#include "state/copy.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace muster::detail::state {
namespace {

/// Size of a cache line.
constexpr std::int64_t line_bytes = 64;

/// Copies whole cache lines; the writes bypass the cache. `to` is aligned to a line.
void stream_lines(char* to, const char* from, std::int64_t bytes) {
#ifdef __SSE2__
  for (std::int64_t at = 0; at < bytes; at += line_bytes)
    for (std::int64_t part = at; part < at + line_bytes; part += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + part),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + part)));
  _mm_sfence();
#else
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
#endif
}

void stream_values(char* to, const char* from, std::int64_t bytes) {
  const auto head = static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(to) % line_bytes);
  const auto lines = (bytes - head) / line_bytes;
  std::memcpy(to, from, static_cast<std::size_t>(head));
  at::parallel_for(0, lines, (1 << 20) / line_bytes, [&](std::int64_t begin, std::int64_t end) {
    stream_lines(to + head + begin * line_bytes, from + head + begin * line_bytes, (end - begin) * line_bytes);
  });
  const auto done = head + lines * line_bytes;
  std::memcpy(to + done, from + done, static_cast<std::size_t>(bytes - done));
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_conj() &&
         !tensor.is_neg();
}

/// Narrows `tensor` to size 1 in each dimension in which `like` is expanded (at::Tensor::expand).
at::Tensor without_repetitions(at::Tensor tensor, const at::Tensor& like) {
  for (std::int64_t i = 0; i < like.dim(); ++i)
    if (like.stride(i) == 0 && like.size(i) > 1) tensor = tensor.narrow(i, 0, 1);
  return tensor;
}

bool is_expanded(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && without_repetitions(tensor, tensor).sizes() != tensor.sizes();
}

}  // namespace

bool can_copy(const at::Tensor& to, const at::Tensor& from) {
  if (!is_expanded(to) || to.sizes() != from.sizes()) return true;
  return at::equal(without_repetitions(from, to).expand_as(from), from);
}

void copy_values(const at::Tensor& to, const at::Tensor& from) {
  constexpr std::size_t large = 256 << 10;
  const at::NoGradGuard no_grad;
  // Torch does not write to an expanded tensor.
  if (is_expanded(to) && to.sizes() == from.sizes()) {
    without_repetitions(to, to).copy_(without_repetitions(from, to));
    return;
  }
  if (from.nbytes() < large || !is_plain(to) || !is_plain(from) || to.scalar_type() != from.scalar_type() ||
      to.sizes() != from.sizes()) {
    to.copy_(from);
    return;
  }
  stream_values(static_cast<char*>(to.mutable_data_ptr()), static_cast<const char*>(from.const_data_ptr()),
                static_cast<std::int64_t>(from.nbytes()));
  if (!to.is_inference()) to.unsafeGetTensorImpl()->bump_version();
}

}  // namespace muster::detail::state
