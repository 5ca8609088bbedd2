// Times and timeouts that users and batch systems give.
#pragma once

#include "base/number.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace muster::detail {

/// The timeout, but at most 100 years: then a clock's time plus two timeouts fits into 64 bits of nanoseconds.
constexpr std::chrono::milliseconds usable_timeout(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::years(100));
}

/// The longest time that is accepted from users and batch systems: about 31 years, so that sums do not overflow.
inline constexpr std::chrono::seconds longest_time{1'000'000'000};

/// Parses a time as Slurm does: "MM:SS", "HH:MM:SS", "D-HH", "D-HH:MM", "D-HH:MM:SS", or one number, in units of
/// `unit`. Empty for any other text, and for times above longest_time.
inline std::optional<std::chrono::seconds> parse_clock(std::string_view text, std::chrono::seconds unit) {
  constexpr std::int64_t units[] = {86400, 3600, 60, 1};
  const bool has_days = text.find('-') != text.npos;
  std::vector<std::int64_t> numbers;
  for (std::size_t end = 0; end != text.npos; text.remove_prefix(std::min(end, text.size() - 1) + 1)) {
    end = text.find(has_days && numbers.empty() ? '-' : ':');
    const auto number = parse_number<std::uint32_t>(text.substr(0, end));
    if (!number) return {};
    numbers.push_back(*number);
  }
  const auto count = numbers.size();
  if (count > (has_days ? 4U : 3U)) return {};
  auto total = count == 1 ? numbers[0] * unit : std::chrono::seconds(0);
  // With days, the numbers are days, hours, minutes, seconds, from the first on; without, the last one counts seconds.
  for (std::size_t i = 0; count > 1 && i < count; ++i)
    total += std::chrono::seconds(numbers[i] * units[has_days ? i : 4 - count + i]);
  return total <= longest_time ? std::optional(total) : std::nullopt;
}

}  // namespace muster::detail
