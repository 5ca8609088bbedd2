#include "text.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <iostream>

namespace muster::tool {
namespace {

constexpr std::size_t gap = 2;
constexpr std::size_t narrowest = 20;  ///< the least width of a last column that is broken into lines

/// The number of characters, not bytes, in UTF-8.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

/// The number of bytes of the UTF-8 character at the beginning of `text`; 0 if there is none.
std::size_t character_bytes(std::string_view text) {
  const auto byte = static_cast<unsigned char>(text[0]);
  const std::size_t bytes = byte < 0x80 ? 1 : byte < 0xC2 ? 0 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : byte < 0xF5 ? 4 : 0;
  if (text.size() < bytes || width(std::string(text.substr(0, bytes))) > 1) return 0;
  return bytes;
}

std::string padded(const std::string& text, std::size_t columns, bool right) {
  const std::string space(columns - std::min(columns, width(text)), ' ');
  return right ? space + text : text + space;
}

/// The words between the spaces of a text. A command in backticks is one word, which can be copied as it is.
std::vector<std::string> words_of(const std::string& text) {
  constexpr const char* spaces = " \t\n\v\f\r";
  std::vector<std::string> words;
  for (auto begin = text.find_first_not_of(spaces); begin != text.npos;) {
    auto end = begin;
    for (; end < text.size() && std::strchr(spaces, text[end]) == nullptr; ++end)
      if (const auto close = text[end] == '`' ? text.find('`', end + 1) : text.npos; close != text.npos) end = close;
    words.push_back(text.substr(begin, end - begin));
    begin = text.find_first_not_of(spaces, end);
  }
  return words;
}

void flatten(const nlohmann::json& value, const std::string& path, Table& table) {
  if (value.is_object() && !value.empty()) {
    for (const auto& [key, entry] : value.items()) flatten(entry, path.empty() ? key : path + "." + key, table);
    return;
  }
  table.rows.push_back({path, value.is_string()
                                  ? value.get<std::string>()
                                  : value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)});
}

}  // namespace

std::vector<std::string> wrapped(const std::string& text, std::size_t columns) {
  std::vector<std::string> lines(1);
  for (const auto& word : words_of(text)) {
    auto& line = lines.back();
    if (line.empty())
      line = word;
    else if (width(line) + 1 + width(word) <= columns)
      line += " " + word;
    else
      lines.push_back(word);
  }
  return lines;
}

std::string printable(std::string_view text) {
  std::string shown;
  for (; !text.empty(); text.remove_prefix(std::max<std::size_t>(character_bytes(text), 1))) {
    const auto byte = static_cast<unsigned char>(text[0]);
    const auto next = static_cast<unsigned char>(text.size() > 1 ? text[1] : 0);
    const auto bytes = character_bytes(text);
    const bool wide = byte == 0xC2 && bytes == 2 && next < 0xA0;  // U+0080 to U+009F
    std::array<char, 8> escaped{};
    if (bytes == 0 || wide || byte < 0x20 || byte == 0x7f) {
      std::snprintf(escaped.data(), escaped.size(), wide ? "\\u%04x" : "\\x%02x", wide ? next : byte);
      shown += escaped.data();
    } else {
      shown += text.substr(0, bytes);
    }
  }
  return shown;
}

void print_json(const nlohmann::json& value) {
  std::cout << value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

std::string to_text(const Table& given, bool with_headings) {
  auto table = given;
  for (auto& row : table.rows)
    for (auto& cell : row) cell = printable(cell);
  const auto last = table.headings.size() - 1;
  std::vector<std::size_t> widths;
  for (std::size_t column = 0; column <= last; ++column) {
    widths.push_back(std::max(table.headings[column].least, width(table.headings[column].text)));
    for (const auto& row : table.rows) widths.back() = std::max(widths.back(), width(row[column]));
  }
  std::size_t before = 0;
  for (std::size_t column = 0; column < last; ++column) before += widths[column] + gap;
  const auto room = line_width > before + narrowest ? line_width - before : narrowest;

  std::string text;
  const auto add = [&](const std::vector<std::string>& row) {
    const auto lines = wrapped(row[last], std::max(room, width(table.headings[last].text)));
    for (std::size_t i = 0; i < lines.size(); ++i) {
      std::string line;
      for (std::size_t column = 0; column < last; ++column)
        line += padded(i == 0 ? row[column] : "", widths[column] + (table.headings[column].right ? 0 : gap),
                       table.headings[column].right) +
                (table.headings[column].right ? std::string(gap, ' ') : "");
      line += table.headings[last].right ? padded(lines[i], std::min(widths[last], room), true) : lines[i];
      line.erase(line.find_last_not_of(' ') + 1);
      text += line + "\n";
    }
  };
  std::vector<std::string> headings;
  for (const auto& heading : table.headings) headings.push_back(heading.text);
  if (with_headings) add(headings);
  for (const auto& row : table.rows) add(row);
  return text;
}

std::string bullet(const std::string& text) {
  std::string result;
  for (const auto& line : wrapped(printable(text), line_width - 2))
    result += (result.empty() ? "- " : "  ") + line + "\n";
  return result;
}

std::string bytes_text(std::uint64_t bytes) {
  if (bytes < 1000) return std::to_string(bytes) + " B";
  constexpr std::array units{"KB", "MB", "GB", "TB", "PB", "EB"};
  double value = static_cast<double>(bytes) / 1000;
  std::size_t unit = 0;
  while (value >= 999.95 && unit + 1 < units.size()) {
    value /= 1000;
    ++unit;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f %s", value, units[unit]);
  return text.data();
}

Table flattened(const nlohmann::json& object) {
  Table table{{{"key"}, {"value"}}, {}};
  flatten(object, "", table);
  return table;
}

}  // namespace muster::tool
