#include "observe/csv.hpp"

#include <algorithm>

namespace muster::detail::observe {
namespace {

std::string field(const Json& row, const std::string& column) {
  const auto found = row.find(column);
  if (found == row.end() || found->is_null()) return "";
  const auto text = found->is_string() ? found->get<std::string>() : found->dump();
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted.append(c == '"' ? 2 : 1, c);
  return quoted + "\"";
}

}  // namespace

bool add_columns(std::vector<std::string>& columns, const Json& row) {
  const auto before = columns.size();
  for (const auto& [key, value] : row.items())
    if (std::find(columns.begin(), columns.end(), key) == columns.end()) columns.push_back(key);
  return columns.size() != before;
}

std::string csv_header(const std::vector<std::string>& columns) {
  Json names = Json::object();
  for (const auto& column : columns) names[column] = column;
  return csv_line(names, columns);
}

std::string csv_line(const Json& row, const std::vector<std::string>& columns) {
  std::string line;
  for (const auto& column : columns) line += (&column == &columns.front() ? "" : ",") + field(row, column);
  return line + "\n";
}

}  // namespace muster::detail::observe
