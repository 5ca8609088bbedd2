// How windows lie in an array.
#pragma once

#include "muster/dataset.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::data {

/// The windows of an array, along each of its dimensions: size and stride as in WindowOptions, and the margin on both
/// sides.
struct WindowShape {
  std::vector<std::int64_t> array, size, stride, margin;

  /// Checks the options. `names`: of the dimensions, for errors.
  WindowShape(const WindowOptions& options, std::vector<std::int64_t> shape, const std::vector<std::string>& names,
              const std::string& doing);

  /// How many windows there are along each dimension.
  std::vector<std::int64_t> counts() const;
  /// The values of a window along each dimension, with its margin.
  std::int64_t extent(std::size_t dimension) const { return size[dimension] + 2 * margin[dimension]; }
};

}  // namespace muster::detail::data
