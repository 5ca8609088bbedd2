#include "data/sources/window_grid.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace muster::detail::data {

WindowGrid::WindowGrid(std::vector<std::int64_t> counts, std::vector<std::int64_t> tile)
    : counts_(std::move(counts)), tile_(std::move(tile)) {
  for (std::size_t d = 0; d < counts_.size(); ++d) tile_[d] = std::min(tile_[d], counts_[d]);
}

std::int64_t WindowGrid::product(const std::vector<std::int64_t>& counts) noexcept {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{1}, std::multiplies<>());
}

std::vector<std::int64_t> WindowGrid::coordinates(std::int64_t number) const {
  // A part of the grid: first all of it, then the part that has window `number`.
  auto counts = counts_, tile = tile_;
  std::vector<std::int64_t> begin(counts.size(), 0);
  while (true) {
    auto whole = counts;
    for (std::size_t d = 0; d < whole.size(); ++d) whole[d] -= whole[d] % tile[d];
    const auto in_whole_tiles = product(whole);
    if (number < in_whole_tiles) {
      auto at = number / product(tile), inside = number % product(tile);
      for (auto d = whole.size(); d-- > 0; at /= whole[d] / tile[d], inside /= tile[d])
        begin[d] += at % (whole[d] / tile[d]) * tile[d] + inside % tile[d];
      return begin;
    }
    number -= in_whole_tiles;
    // The rest is divided by the first dimension along which a window lies beyond the whole tiles.
    for (std::size_t d = 0;; ++d) {
      auto part = whole;
      part[d] = counts[d] - whole[d];
      std::copy(counts.begin() + static_cast<std::ptrdiff_t>(d) + 1, counts.end(),
                part.begin() + static_cast<std::ptrdiff_t>(d) + 1);
      if (number < product(part)) {
        begin[d] += whole[d];
        tile[d] = part[d];
        counts = std::move(part);
        break;
      }
      number -= product(part);
    }
  }
}

}  // namespace muster::detail::data
