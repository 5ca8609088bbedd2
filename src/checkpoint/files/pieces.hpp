// Files in pieces: each piece has a checksum, and ranks divide the pieces among themselves.
#pragma once

#include "checkpoint/rank.hpp"

#include <cstddef>
#include <cstdint>
#include <span>

namespace muster::detail::checkpoint {

/// [begin, end)
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// The items of `count` that are this rank's: contiguous, in the order of ranks, as many on each but for one.
Range share(std::uint64_t count, Rank rank) noexcept;

/// Bytes of a piece (the last one may be shorter) for a file of that size: a power of two from 64 KiB to 4 MiB, so that
/// ranks that divide a file never touch the same page.
std::uint64_t piece_bytes_for(std::uint64_t file_bytes) noexcept;
std::uint64_t piece_count(std::uint64_t file_bytes, std::uint64_t piece_bytes) noexcept;
/// The bytes of the file that piece `index` covers.
Range piece_range(std::uint64_t file_bytes, std::uint64_t piece_bytes, std::uint64_t index) noexcept;

/// zlib's CRC-32, continued from `before`.
std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

}  // namespace muster::detail::checkpoint
