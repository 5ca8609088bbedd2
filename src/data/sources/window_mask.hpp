// The windows that a mask leaves.
#pragma once

#include "data/sources/window_grid.hpp"
#include "data/sources/window_shape.hpp"
#include "data/sources/window_variable.hpp"

#include <cstdint>
#include <vector>

namespace muster::detail::data {

/// A list of ascending numbers below a limit. It takes 9/8 bits of memory for each number below the limit.
class NumberSet {
 public:
  explicit NumberSet(std::int64_t limit);

  /// Adds a number above all numbers that it has.
  void add(std::int64_t number);
  std::int64_t size() const noexcept { return size_; }
  /// The number at `index`, 0 ≤ index < size().
  std::int64_t operator[](std::int64_t index) const;

 private:
  static constexpr std::int64_t block = 512;  ///< numbers

  std::int64_t size_ = 0;
  std::vector<std::uint64_t> bits_;
  std::vector<std::int64_t> before_;  ///< for each block begun: how many of the list come before it
};

/// The windows of `grid` in which at least `share` of the mask's values, margins apart, are neither 0 nor NaN.
NumberSet windows_of_mask(const WindowVariable& mask, double share, const WindowShape& shape, const WindowGrid& grid);

}  // namespace muster::detail::data
