// Time limits that users give.
#pragma once

#include <algorithm>
#include <chrono>

namespace muster::detail {

/// The limit, or 100 years if it is longer: sums of such limits and of any clock's time fit into nanoseconds, which
/// milliseconds::max() does not.
constexpr std::chrono::milliseconds usable_limit(std::chrono::milliseconds limit) {
  return std::min<std::chrono::milliseconds>(limit, std::chrono::years(100));
}

}  // namespace muster::detail
