// Makes the texts of messages: joins pieces, formats numbers, and writes lists and counts.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace muster::detail {

template <class Piece>
void append_piece(std::string& text, const Piece& piece) {
  static_assert(!std::is_same_v<Piece, bool>, "Say what is true, as in (last ? \"the last\" : \"not the last\")");
  if constexpr (std::is_same_v<Piece, char>)
    text += piece;
  else if constexpr (std::is_convertible_v<const Piece&, std::string_view>)
    text += std::string_view(piece);
  else if constexpr (requires { piece.native(); })
    text += piece.native();
  else
    text += std::to_string(piece);
}

/// One text of several pieces, as in str("rank ", rank, " has read ", path): texts, characters, paths, and numbers as
/// std::to_string() writes them.
template <class... Pieces>
std::string str(const Pieces&... pieces) {
  std::string text;
  (append_piece(text, pieces), ...);
  return text;
}

/// What printf() would print, at most 127 bytes.
[[gnu::format(printf, 1, 2)]] inline std::string formatted(const char* format, ...) {
  char text[128];
  std::va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  return text;
}

/// The names of the first `most` items, and the number of the others: "a, b and 3 more". name(item) returns a name.
template <class T, class Name>
std::string listed(const std::vector<T>& items, std::size_t most, const Name& name) {
  std::string text;
  for (std::size_t i = 0; i < std::min(items.size(), most); ++i)
    text += (i == 0 ? "" : ", ") + std::string(std::invoke(name, items[i]));
  return items.size() <= most ? text : str(text, " and ", items.size() - most, " more");
}

/// Returns the number and the noun `what`, with an s unless the number is 1: "1 rank", "2 ranks".
template <std::integral Count>
std::string counted(Count count, std::string_view what) {
  return str(count, " ", what, count == 1 ? "" : "s");
}

/// Returns "rank 1", or "ranks 0, 2"; if there are more than 8 ranks, the first 8 and "and 3 more".
inline std::string name_ranks(const std::vector<std::size_t>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks, 8, [](auto rank) { return std::to_string(rank); });
}

}  // namespace muster::detail
