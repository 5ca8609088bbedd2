// How windows lie in an array.
#pragma once

#include "muster/dataset.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::data {

/// The windows of an array or a part of it, along each of its dimensions: size and stride as in WindowOptions, and the
/// margin on both sides. The part begins at `first` and has the shape `array`.
struct WindowShape {
  std::vector<std::int64_t> first, array, size, stride, margin;

  /// Checks the options. `begin`: of the part; empty: the begin of the array. `names`: of the dimensions, for errors.
  WindowShape(const WindowOptions& options, std::vector<std::int64_t> shape, const std::vector<std::string>& names,
              const std::string& doing, std::vector<std::int64_t> begin = {});

  /// Where a window begins along one dimension of the whole array, without its margin.
  std::int64_t origin(std::size_t dimension, std::int64_t window) const {
    return first[dimension] + window * stride[dimension];
  }

  /// How many windows there are along each dimension.
  std::vector<std::int64_t> counts() const;
  /// How many values a window has along a dimension, with both margins.
  std::int64_t extent(std::size_t dimension) const { return size[dimension] + 2 * margin[dimension]; }
};

}  // namespace muster::detail::data
