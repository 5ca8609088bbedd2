// Makes text from files and flags safe to print on a terminal.
#pragma once

#include "base/text.hpp"

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

namespace muster::detail {

/// The number of bytes of the UTF-8 character at the beginning of `text`, which must not be empty; 0 if the bytes are
/// not UTF-8.
inline std::size_t utf8_length(std::string_view text) {
  const auto byte = static_cast<unsigned char>(text[0]);
  const std::size_t length = byte < 0x80   ? 1
                             : byte < 0xC2 ? 0
                             : byte < 0xE0 ? 2
                             : byte < 0xF0 ? 3
                             : byte < 0xF5 ? 4
                                           : 0;
  if (text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) return 0;
  // UTF-8 has neither encodings that are longer than needed, nor surrogates, nor numbers above U+10FFFF.
  const auto second = length > 2 ? static_cast<unsigned char>(text[1]) : 0;
  const bool is_wrong = (byte == 0xE0 && second < 0xA0) || (byte == 0xED && second > 0x9F) ||
                        (byte == 0xF0 && second < 0x90) || (byte == 0xF4 && second > 0x8F);
  return is_wrong ? 0 : length;
}

/// The number of characters, not bytes, in UTF-8 text.
inline std::size_t character_count(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }));
}

/// Returns `text` if it has at most `characters` characters. Otherwise cuts it and adds "…", so that it has that many.
inline std::string shortened(std::string text, std::size_t characters) {
  if (character_count(text) <= characters) return text;
  while (character_count(text) >= characters && !text.empty()) text.pop_back();  // removes whole characters
  return text + "…";
}

/// Returns `text` with control characters and bytes that are not UTF-8 written as "\x1b" or "\u0085"; line breaks and
/// tabs stay.
inline std::string printable(std::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const auto byte = static_cast<unsigned char>(text[0]);
    const auto length = utf8_length(text);
    if (length == 0 || (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f)
      shown += formatted("\\x%02x", byte);
    else if (byte == 0xC2 && static_cast<unsigned char>(text[1]) < 0xA0)  // U+0080 to U+009F
      shown += formatted("\\u%04x", static_cast<unsigned char>(text[1]));
    else
      shown += text.substr(0, length);
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return shown;
}

/// Like printable(), but in one line: line breaks and tabs become "\x0a" and "\x09".
inline std::string printable_in_line(std::string_view text) {
  std::string shown;
  for (const char c : printable(text)) shown += c == '\n' ? "\\x0a" : c == '\t' ? "\\x09" : std::string(1, c);
  return shown;
}

}  // namespace muster::detail
