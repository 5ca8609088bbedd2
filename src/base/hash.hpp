// Hashes that are the same on every machine.
#pragma once

#include <cstdint>
#include <string_view>

namespace muster::detail {

/// The 64-bit FNV-1a hash of the text.
constexpr std::uint64_t hash_of_text(std::string_view text) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

/// A round of SplitMix64 (Steele, Lea and Flood, 2014): every bit of `x` affects every bit of the result.
constexpr std::uint64_t scrambled(std::uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace muster::detail
