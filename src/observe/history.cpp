#include "observe/history.hpp"

#include "base/file.hpp"

#include <algorithm>
#include <sstream>

namespace muster::observe {
namespace {

std::string line_of(const Config& row) { return row.dump(-1, ' ', false, Config::error_handler_t::replace) + "\n"; }

/// A field by RFC 4180.
std::string field(const Config& row, const std::string& column) {
  const auto found = row.find(column);
  if (found == row.end() || found->is_null()) return "";
  const auto text = found->is_string() ? found->get<std::string>() : found->dump();
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted.append(c == '"' ? 2 : 1, c);
  return quoted + "\"";
}

std::string table_line(const Config& row, const std::vector<std::string>& columns) {
  std::string line;
  for (const auto& column : columns)
    line += (line.empty() && &column == &columns.front() ? "" : ",") + field(row, column);
  return line + "\n";
}

/// Adds the row's new columns; whether there were any.
bool extend(std::vector<std::string>& columns, const Config& row) {
  const auto before = columns.size();
  for (const auto& [key, value] : row.items())
    if (std::find(columns.begin(), columns.end(), key) == columns.end()) columns.push_back(key);
  return columns.size() != before;
}

}  // namespace

std::vector<Config> History::read(const std::filesystem::path& folder) {
  std::vector<Config> rows;
  if (!std::filesystem::exists(folder / "result.json")) return rows;
  std::istringstream lines(read_file(folder / "result.json"));
  for (std::string line; std::getline(lines, line);) {
    auto row = Config::parse(line, nullptr, false);
    if (row.is_object()) rows.push_back(std::move(row));
  }
  return rows;
}

History::History(std::filesystem::path folder, std::int64_t training_iteration, const Config& last)
    : folder_(std::move(folder)) {
  for (auto& row : read(folder_))
    if (row.value("training_iteration", std::int64_t{0}) <= training_iteration) rows_.push_back(std::move(row));
  const auto have = rows_.empty() ? 0 : rows_.back().value("training_iteration", std::int64_t{0});
  if (last.is_object() && have < training_iteration) rows_.push_back(last);
  for (const auto& row : rows_) extend(columns_, row);
  std::string text;
  for (const auto& row : rows_) text += line_of(row);
  write_file(folder_ / "result.json", text);
  write_table();
}

void History::append(const Config& row) {
  rows_.push_back(row);
  File results(folder_ / "result.json", File::Mode::append);
  results.append(line_of(row));
  results.close();
  if (extend(columns_, row)) return write_table();
  File table(folder_ / "progress.csv", File::Mode::append);
  table.append(table_line(row, columns_));
  table.close();
}

void History::write_table() const {
  std::string text;
  Config names = Config::object();
  for (const auto& column : columns_) names[column] = column;
  if (!columns_.empty()) text = table_line(names, columns_);
  for (const auto& row : rows_) text += table_line(row, columns_);
  write_file(folder_ / "progress.csv", text);
}

}  // namespace muster::observe
