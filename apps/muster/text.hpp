// What the tool prints: tables that fit a terminal, sizes for people.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace muster::tool {

/// Columns are as wide as their widest cell; the last one is broken into lines where a row would be wider than 80.
struct Table {
  struct Heading {
    std::string text;
    bool right = false;     ///< numbers
    std::size_t least = 0;  ///< width, for a table that is printed in parts
  };
  std::vector<Heading> headings;
  std::vector<std::vector<std::string>> rows;
};

/// `text` with control characters as "\x1b": names out of files and of the command line, for a terminal.
std::string printable(std::string_view text);
/// To stdout; bytes that are no UTF-8 are replaced.
void print_json(const nlohmann::json& value);

/// Each line of it ends with a newline and has no spaces before that. The headings are left out where a part of the
/// table was printed before.
std::string to_text(const Table& table, bool with_headings = true);
/// "- TEXT" in lines of at most 80.
std::string bullet(const std::string& text);
/// "47.0 MB"; powers of 1000.
std::string bytes_text(std::uint64_t bytes);
/// Rows "path.to.value" and value for everything in a JSON object.
Table flattened(const nlohmann::json& object);

}  // namespace muster::tool
