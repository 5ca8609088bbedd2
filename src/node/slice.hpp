// Which elements of an array each of several ranks owns: a pure function.
#pragma once

#include "node/dtype.hpp"
#include "node/shared_segment.hpp"

#include <algorithm>
#include <cstddef>

namespace muster::detail::node {

/// Elements from `first` on.
struct Slice {
  std::size_t first = 0;
  std::size_t count = 0;

  /// Its elements from `begin` on, `most` of them or what is left.
  Slice chunk(std::size_t begin, std::size_t most) const {
    begin = std::min(begin, count);
    return {first + begin, std::min(most, count - begin)};
  }
};

/// The slice of `owner` among `owners`: whole cache lines as far as that goes.
inline Slice slice_of(std::size_t count, int owners, int owner, Dtype type) {
  const auto unit = std::max<std::size_t>(1, cache_line / size_of(type));
  const auto units = (count + unit - 1) / unit;
  const auto each = (units + static_cast<std::size_t>(owners) - 1) / static_cast<std::size_t>(owners) * unit;
  return Slice{0, count}.chunk(each * static_cast<std::size_t>(owner), each);
}

}  // namespace muster::detail::node
