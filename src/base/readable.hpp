// Numbers, sizes and times as people read them.
#pragma once

#include "base/text.hpp"

#include <cstddef>
#include <iterator>
#include <string>

namespace muster::detail {

/// "0.1235": with four significant digits.
inline std::string number_text(double value) { return formatted("%.4g", value); }

/// "12 B", "47.0 MB", in powers of 1000.
inline std::string bytes_text(double bytes) {
  constexpr const char* units[] = {"B", "KB", "MB", "GB", "TB", "PB", "EB"};
  std::size_t unit = 0;
  for (; bytes >= 999.95 && unit + 1 < std::size(units); ++unit) bytes /= 1000;
  return formatted(unit == 0 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
}

/// "2:05", "1:00:05".
inline std::string clock_text(long long seconds) {
  return seconds < 3600 ? formatted("%lld:%02lld", seconds / 60, seconds % 60)
                        : formatted("%lld:%02lld:%02lld", seconds / 3600, seconds / 60 % 60, seconds % 60);
}

}  // namespace muster::detail
