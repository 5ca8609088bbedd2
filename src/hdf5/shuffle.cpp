#include "hdf5/shuffle.hpp"

#include "base/vectorize.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

namespace muster::detail::hdf5 {
namespace {

/// Interleaves the first `count` bytes of `Planes` planes, which lie `stride` bytes apart.
template <std::size_t Planes>
void interleave(const std::byte* from, std::size_t stride, std::size_t count, std::byte* into) {
  MUSTER_INDEPENDENT_ITERATIONS
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t plane = 0; plane < Planes; ++plane) into[i * Planes + plane] = from[plane * stride + i];
}

/// Like interleave<Planes>(), for any number of planes, in tiles that stay in the cache.
void interleave(const std::byte* from, std::size_t stride, std::size_t count, std::size_t planes, std::byte* into) {
  constexpr std::size_t tile = 64;
  for (std::size_t begin = 0; begin < count; begin += tile) {
    const auto end = std::min(count, begin + tile);
    for (std::size_t plane = 0; plane < planes; ++plane)
      for (std::size_t i = begin; i < end; ++i) into[i * planes + plane] = from[plane * stride + i];
  }
}

void join_planes(const std::byte* from, std::size_t stride, std::size_t count, std::size_t planes, std::byte* into) {
  if (planes == 1) return static_cast<void>(std::memcpy(into, from, count));
  if (planes == 2) return interleave<2>(from, stride, count, into);
  if (planes == 4) return interleave<4>(from, stride, count, into);
  if (planes == 8) return interleave<8>(from, stride, count, into);
  if (planes == 16) return interleave<16>(from, stride, count, into);
  interleave(from, stride, count, planes, into);
}

/// Transposes the 8 × 8 bits in each word: bit j of byte i becomes bit i of byte j.
void transpose_bits(std::uint64_t* words, std::size_t count) {
  MUSTER_INDEPENDENT_ITERATIONS
  for (std::size_t i = 0; i < count; ++i) {
    auto word = words[i];
    auto moved = (word ^ (word >> 7)) & 0x00aa00aa00aa00aaU;
    word ^= moved ^ (moved << 7);
    moved = (word ^ (word >> 14)) & 0x0000cccc0000ccccU;
    word ^= moved ^ (moved << 14);
    moved = (word ^ (word >> 28)) & 0x00000000f0f0f0f0U;
    words[i] = word ^ moved ^ (moved << 28);
  }
}

}  // namespace

void unshuffle(std::span<const std::byte> from, std::size_t value_bytes, std::span<std::byte> into) {
  const auto count = from.size() / value_bytes, whole = count * value_bytes;
  join_planes(from.data(), count, count, value_bytes, into.data());
  std::copy(from.begin() + static_cast<std::ptrdiff_t>(whole), from.end(),
            into.begin() + static_cast<std::ptrdiff_t>(whole));
}

void bit_unshuffle(std::span<const std::byte> from, std::size_t value_bytes, std::span<std::byte> into) {
  static_assert(std::endian::native == std::endian::little, "transpose_bits() takes byte 0 of a word for its lowest");
  constexpr std::size_t tile = 64;  // words at once; each belongs to a group of 8 values
  const auto groups = from.size() / value_bytes / 8, at_once = std::min(tile, groups);
  std::array<std::uint64_t, tile> words;
  std::vector<std::byte> planes(at_once * 8 * value_bytes);  // planes of bytes, as the shuffle filter makes them
  for (std::size_t begin = 0; begin < groups; begin += at_once) {
    const auto count = std::min(at_once, groups - begin);
    for (std::size_t plane = 0; plane < value_bytes; ++plane) {
      interleave<8>(from.data() + plane * 8 * groups + begin, groups, count,
                    reinterpret_cast<std::byte*>(words.data()));
      transpose_bits(words.data(), count);
      std::memcpy(planes.data() + plane * count * 8, words.data(), count * 8);
    }
    join_planes(planes.data(), count * 8, count * 8, value_bytes, into.data() + begin * 8 * value_bytes);
  }
}

}  // namespace muster::detail::hdf5
