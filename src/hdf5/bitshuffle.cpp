#include "hdf5/codecs.hpp"
#include "hdf5/shuffle.hpp"

#include <algorithm>
#include <vector>

namespace muster::detail::hdf5 {
namespace {

constexpr std::size_t group = 8;  ///< values whose bits are transposed together

/// How many values a block has if the writer has not chosen its size.
std::size_t default_block(std::size_t value_bytes) {
  return std::max<std::size_t>(128, 8192 / value_bytes / group * group);
}

}  // namespace

// With a codec, a chunk begins with its size and the size of a block, both in bytes, and each block follows its stored
// size. The last block may be shorter. Up to 7 values that fill no group end the chunk, stored as they are.
bool decode_bitshuffle(const Filter& filter, std::span<const std::byte> stored, std::span<std::byte> into) {
  const std::size_t value_bytes = filter.value(2), codec = filter.value(bitshuffle_codec);
  if (value_bytes == 0 || into.size() % value_bytes != 0) return false;
  std::size_t block = filter.value(3) == 0 ? default_block(value_bytes) : filter.value(3);
  const auto decode = codec == bitshuffle_lz4    ? bare_decoder("lz4")
                      : codec == bitshuffle_zstd ? bare_decoder("zstd")
                                                 : nullptr;
  if (decode != nullptr) {
    if (stored.size() < 12 || big_endian64(stored) != into.size()) return false;
    block = big_endian32(stored.subspan(8)) / value_bytes;
    stored = stored.subspan(12);
  } else if (stored.size() != into.size()) {
    return false;
  }
  if (block == 0 || block % group != 0) return false;
  std::vector<std::byte> decoded;
  for (auto left = into.size() / value_bytes; left >= group;) {
    const auto count = std::min(block, left / group * group), length = count * value_bytes;
    auto shuffled = stored;
    if (decode != nullptr) {
      if (stored.size() < 4) return false;
      const std::size_t size = big_endian32(stored);
      stored = stored.subspan(4);
      if (size > stored.size()) return false;
      decoded.resize(length);
      if (!decode(stored.first(size), decoded)) return false;
      shuffled = decoded;
      stored = stored.subspan(size);
    } else {
      stored = stored.subspan(length);
    }
    bit_unshuffle(shuffled.first(length), value_bytes, into.first(length));
    into = into.subspan(length);
    left -= count;
  }
  if (stored.size() < into.size()) return false;
  std::copy_n(stored.begin(), into.size(), into.begin());
  return true;
}

}  // namespace muster::detail::hdf5
