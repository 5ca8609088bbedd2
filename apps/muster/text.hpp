// Formats the tool's output: tables that fit a terminal, readable sizes.
#pragma once

#include "base/printable.hpp"
#include "base/readable.hpp"

#include <nlohmann/json.hpp>

#include <string>
#include <string_view>
#include <vector>

namespace muster::tool {

inline constexpr std::size_t line_width = 80;

/// Breaks text into lines at spaces. A word that is longer than a line is not broken, nor is a command in backticks, so
/// that it can be copied.
std::vector<std::string> wrapped(const std::string& text, std::size_t columns);

/// A table. Columns are as wide as their widest cell. The text of the last column is broken into lines if a row would
/// be wider than 80 characters.
struct Table {
  struct Heading {
    std::string text;
    bool right = false;     ///< true to align to the right, for numbers
    std::size_t least = 0;  ///< least width, for a table that is printed in parts
  };
  std::vector<Heading> headings;
  std::vector<std::vector<std::string>> rows;
};

using detail::bytes_text;
/// Returns the text in one line and without control characters, so that names from files and the command line are safe
/// on a terminal.
inline std::string printable(std::string_view text) { return detail::printable_in_line(text); }
/// Prints to stdout; bytes that are not UTF-8 are replaced.
void print_json(const nlohmann::json& value);

/// Returns the table as text. Each line ends with a newline and without spaces before it. `with_headings`: false for a
/// later part of a table.
std::string to_text(const Table& table, bool with_headings = true);
/// Returns "- TEXT" in lines of at most 80 characters, broken as wrapped() does.
std::string bullet(const std::string& text);
/// Returns a table with a row for each value in a JSON object: "path.to.value" and the value.
Table flattened(const nlohmann::json& object);

}  // namespace muster::tool
