// Copies that bypass the processor's caches (on x86; elsewhere plain copies), for data that are not read again soon.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace muster::detail::node {

/// Like memcpy(), but other threads see the data only after stream_fence().
inline void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
#if defined(__x86_64__)
  constexpr std::size_t unit = sizeof(__m128i), line = 4 * unit;
  const auto head = std::min(bytes, (line - reinterpret_cast<std::uintptr_t>(to) % line) % line);
  std::memcpy(to, from, head);
  const auto end = head + (bytes - head) / line * line;
  for (auto at = head; at < end; at += line)
    for (std::size_t i = 0; i < line; i += unit)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + i)));
  std::memcpy(to + end, from + end, bytes - end);
#else
  std::memcpy(to, from, bytes);
#endif
}

/// Makes the copies of stream_copy() visible to other threads.
inline void stream_fence() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace muster::detail::node
