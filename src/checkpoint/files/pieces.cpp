#include "checkpoint/files/pieces.hpp"

#include <zlib.h>

#include <algorithm>
#include <bit>

namespace muster::detail::checkpoint {

Range share(std::uint64_t count, Rank of) noexcept {
  const auto ranks = static_cast<std::uint64_t>(of.size), rank = static_cast<std::uint64_t>(of.rank);
  const auto each = count / ranks, more = count % ranks;
  const auto begin = rank * each + std::min(rank, more);
  return {begin, begin + each + (rank < more ? 1 : 0)};
}

std::uint64_t piece_bytes_for(std::uint64_t file_bytes) noexcept {
  constexpr std::uint64_t smallest = 64 << 10, largest = 4 << 20, pieces = 1024;
  return std::bit_ceil(std::clamp(file_bytes / pieces, smallest, largest));
}

std::uint64_t piece_count(std::uint64_t file_bytes, std::uint64_t piece_bytes) noexcept {
  return file_bytes / piece_bytes + (file_bytes % piece_bytes != 0 ? 1 : 0);
}

Range piece_range(std::uint64_t file_bytes, std::uint64_t piece_bytes, std::uint64_t index) noexcept {
  const auto begin = index * piece_bytes;
  return {begin, begin + std::min(piece_bytes, file_bytes - begin)};
}

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  return static_cast<std::uint32_t>(::crc32_z(before, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

}  // namespace muster::detail::checkpoint
