// Makes text from files and flags safe to print on a terminal.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace muster::detail {

/// Returns `text` with control characters written as "\x1b" or "\u0085"; line breaks and tabs stay.
inline std::string printable(std::string_view text) {
  std::string shown;
  const auto escape = [&](const char* form, unsigned code) {
    char digits[8];
    std::snprintf(digits, sizeof digits, form, code);
    shown += digits;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    if ((byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f) {
      escape("\\x%02x", byte);
    } else if (byte == 0xC2 && next >= 0x80 && next < 0xA0) {  // U+0080 to U+009F in UTF-8
      escape("\\u%04x", next);
      ++i;
    } else {
      shown += text[i];
    }
  }
  return shown;
}

}  // namespace muster::detail
