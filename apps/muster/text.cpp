#include "text.hpp"

#include <algorithm>
#include <cstring>
#include <iostream>

namespace muster::tool {
namespace {

constexpr std::size_t gap = 2;
constexpr std::size_t narrowest = 20;  ///< least width of a last column whose text is broken into lines

std::string padded(const std::string& text, std::size_t columns, bool right) {
  const std::string space(columns - std::min(columns, detail::character_count(text)), ' ');
  return right ? space + text : text + space;
}

/// Splits a text at spaces. A command in backticks counts as one word, so that it can be copied as it is.
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
    else if (detail::character_count(line) + 1 + detail::character_count(word) <= columns)
      line += " " + word;
    else
      lines.push_back(word);
  }
  return lines;
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
    widths.push_back(std::max(table.headings[column].least, detail::character_count(table.headings[column].text)));
    for (const auto& row : table.rows) widths.back() = std::max(widths.back(), detail::character_count(row[column]));
  }
  std::size_t before = 0;
  for (std::size_t column = 0; column < last; ++column) before += widths[column] + gap;
  const auto room = line_width > before + narrowest ? line_width - before : narrowest;

  std::string text;
  const auto add = [&](const std::vector<std::string>& row) {
    const auto lines = wrapped(row[last], std::max(room, detail::character_count(table.headings[last].text)));
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

Table flattened(const nlohmann::json& object) {
  Table table{{{"key"}, {"value"}}, {}};
  flatten(object, "", table);
  return table;
}

}  // namespace muster::tool
