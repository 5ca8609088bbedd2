// Timeouts that users give.
#pragma once

#include <algorithm>
#include <chrono>

namespace muster::detail {

/// The timeout, or 100 years if it is longer: sums of such timeouts and of any clock's time fit into nanoseconds, which
/// milliseconds::max() does not.
constexpr std::chrono::milliseconds usable_timeout(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::years(100));
}

}  // namespace muster::detail
