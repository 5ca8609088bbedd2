// Files in pieces: each piece has a checksum, and ranks divide the pieces among themselves.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace muster::detail::checkpoint {

/// Which rank of how many: whose share of the work, whose part of an entry.
struct Rank {
  int rank = 0;
  int size = 1;
};

/// [begin, end)
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// The items of `count` that are this rank's: contiguous, in the order of ranks, as many on each but for one.
inline Range share(std::uint64_t count, Rank of) noexcept {
  const auto ranks = static_cast<std::uint64_t>(of.size), rank = static_cast<std::uint64_t>(of.rank);
  const auto each = count / ranks, more = count % ranks;
  const auto begin = rank * each + std::min(rank, more);
  return {begin, begin + each + (rank < more ? 1 : 0)};
}

/// Bytes of a piece (the last may be shorter): a power of two from 64 KiB to 4 MiB, so ranks never share a page.
inline std::uint64_t piece_bytes_for(std::uint64_t file_bytes) noexcept {
  constexpr std::uint64_t smallest = 64 << 10, largest = 4 << 20, pieces = 1024;
  return std::bit_ceil(std::clamp(file_bytes / pieces, smallest, largest));
}
inline std::uint64_t piece_count(std::uint64_t file_bytes, std::uint64_t piece_bytes) noexcept {
  return file_bytes / piece_bytes + (file_bytes % piece_bytes != 0 ? 1 : 0);
}
/// The bytes of the file that piece `index` covers.
inline Range piece_range(std::uint64_t file_bytes, std::uint64_t piece_bytes, std::uint64_t index) noexcept {
  const auto begin = index * piece_bytes;
  return {begin, begin + std::min(piece_bytes, file_bytes - begin)};
}

/// CRC-32 as zlib has it, continued from `before`.
std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

}  // namespace muster::detail::checkpoint
