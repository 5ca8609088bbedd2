// Lists and counts for messages.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace muster::detail {

/// The names of the first `most` items: "a, b and 3 more".
template <class T, class Name>
std::string listed(const std::vector<T>& items, std::size_t most, const Name& name) {
  std::string text;
  for (std::size_t i = 0; i < std::min(items.size(), most); ++i)
    text += (i == 0 ? "" : ", ") + std::string(std::invoke(name, items[i]));
  return items.size() <= most ? text : text + " and " + std::to_string(items.size() - most) + " more";
}

/// "1 rank", "2 ranks".
template <std::integral Count>
std::string counted(Count count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

/// "rank 1", "ranks 0, 2".
inline std::string name_ranks(const std::vector<std::size_t>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks, 8, [](auto rank) { return std::to_string(rank); });
}

}  // namespace muster::detail
