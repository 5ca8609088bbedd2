// Numbers, sizes and times as people read them.
#pragma once

#include "base/text.hpp"

#include <cstddef>
#include <iterator>
#include <string>

namespace muster::detail {

/// Returns the number with at most four significant digits: "0.1235", "0.5", "1.235e+05".
inline std::string number_text(double value) { return formatted("%.4g", value); }

/// Returns a size in units that are powers of 1000: "12 B", "47.0 MB".
inline std::string bytes_text(double bytes) {
  constexpr const char* units[] = {"B", "KB", "MB", "GB", "TB", "PB", "EB"};
  std::size_t unit = 0;
  for (; bytes >= 999.95 && unit + 1 < std::size(units); ++unit) bytes /= 1000;
  return formatted(unit == 0 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
}

/// Returns a time in seconds as "M:SS" or, from an hour on, "H:MM:SS": "2:05", "1:00:05".
inline std::string clock_text(long long seconds) {
  return seconds < 3600 ? formatted("%lld:%02lld", seconds / 60, seconds % 60)
                        : formatted("%lld:%02lld:%02lld", seconds / 3600, seconds / 60 % 60, seconds % 60);
}

}  // namespace muster::detail
