// Files are divided into pieces. Each piece has a checksum, and the ranks divide the pieces among themselves.
#pragma once

#include "base/export.hpp"
#include "state/rank_in_group.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace muster::detail::checkpoint {

/// The half-open range [begin, end).
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// Returns the share that rank `of` has of `count` items: contiguous, in the order of ranks. Sizes differ by at most
/// one.
inline Range share_of(std::uint64_t count, state::RankInGroup of) noexcept {
  const auto ranks = static_cast<std::uint64_t>(of.size), rank = static_cast<std::uint64_t>(of.rank);
  const auto each = count / ranks, more = count % ranks;
  const auto begin = rank * each + std::min(rank, more);
  return {begin, begin + each + (rank < more ? 1 : 0)};
}

/// Returns the size of a piece in bytes; the last piece may be shorter. The size is a power of two from 64 KiB to 4
/// MiB, so two ranks never write to the same memory page or file block.
inline std::uint64_t piece_bytes_for(std::uint64_t file_bytes) noexcept {
  constexpr std::uint64_t smallest = 64 << 10, largest = 4 << 20, pieces = 1024;
  return std::bit_ceil(std::clamp(file_bytes / pieces, smallest, largest));
}
inline std::uint64_t piece_count(std::uint64_t file_bytes, std::uint64_t piece_bytes) noexcept {
  return file_bytes / piece_bytes + (file_bytes % piece_bytes != 0 ? 1 : 0);
}
/// Returns the bytes of the file that piece `index` covers.
inline Range piece_range(std::uint64_t file_bytes, std::uint64_t piece_bytes, std::uint64_t index) noexcept {
  const auto begin = index * piece_bytes;
  return {begin, begin + std::min(piece_bytes, file_bytes - begin)};
}

/// Returns the CRC-32 of `bytes` as zlib computes it. `before`: the CRC-32 of the bytes before these.
MUSTER_INTERNAL_API std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

/// Returns the checksum that the manifest stores for a piece. `before`: the checksum of the bytes before these.
inline std::uint32_t piece_checksum(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept {
  return crc32(bytes, before);
}

}  // namespace muster::detail::checkpoint
