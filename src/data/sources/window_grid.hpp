// How windows are numbered, so that windows near one another in the array have near numbers.
#pragma once

#include <cstdint>
#include <vector>

namespace muster::detail::data {

/// A grid of windows, divided into tiles. The windows of the first tile come first, in the order of their coordinates,
/// the last dimension running fastest; then those of the next tile. Tiles that the grid fills only in part come after
/// the whole ones, so the tile of a window in a whole tile is its number divided by tile_size().
class WindowGrid {
 public:
  /// The windows along each dimension of the grid, and of a tile; all at least 1. Their product must not overflow.
  WindowGrid(std::vector<std::int64_t> counts, std::vector<std::int64_t> tile);

  std::int64_t size() const noexcept { return product(counts_); }
  std::int64_t tile_size() const noexcept { return product(tile_); }
  /// The coordinates of window `number`, 0 ≤ number < size().
  std::vector<std::int64_t> coordinates(std::int64_t number) const;

 private:
  static std::int64_t product(const std::vector<std::int64_t>& counts) noexcept;

  std::vector<std::int64_t> counts_, tile_;
};

}  // namespace muster::detail::data
