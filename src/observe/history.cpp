#include "observe/history.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/run_names.hpp"
#include "muster/error.hpp"
#include "observe/csv.hpp"

#include <algorithm>
#include <sstream>
#include <system_error>
#include <utility>

namespace muster::detail::observe {
namespace {

void append_to(const std::filesystem::path& path, const std::string& line) {
  File file(path, File::Mode::append);
  file.append(line);
  file.close();
}

std::string line_of(const Json& row) { return json_text_lossy(row) + "\n"; }

/// Returns the number of the report that the row belongs to; 0 if the row has none.
std::int64_t iteration_of(const Json& row) { return row.value("training_iteration", std::int64_t{0}); }

void warn_of_missing(const std::filesystem::path& folder, std::int64_t have, std::int64_t last) {
  if (have < last)
    log::warn(str("the metrics of the reports ", have + 1, " to ", last, " are not in ", (folder / run_names::history),
                  " any more"));
}

void check_row(const Json& row, const std::string& doing) {
  constexpr auto most = std::uint64_t{1} << 53;
  const auto fail = [&](const char* fact) {
    throw Error(ExitCode::data, doing, fact, "Correct that line or remove it; it only records what was reported");
  };
  if (!row.is_object()) fail("it is not a JSON object");
  const auto at = row.find("training_iteration");
  if (at != row.end() && (!at->is_number_unsigned() || at->get<std::uint64_t>() > most))
    fail("\"training_iteration\" is not a report's number");
}

}  // namespace

std::vector<Json> History::read(const std::filesystem::path& folder) {
  std::vector<Json> rows;
  const auto path = folder / run_names::history;
  if (!std::filesystem::exists(status_of(path))) return rows;
  std::istringstream lines(read_file(path, max_json_bytes));
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    const auto doing = str("reading ", path, ", line ", ++number);
    if (line.empty()) continue;
    // A crash may cut off the last line. A power loss may leave zeros in a file that was not synced.
    const bool cut_off = lines.eof() || line.find('\0') != line.npos;
    try {
      auto row = parse_json(line, doing);
      check_row(row, doing);
      rows.push_back(std::move(row));
    } catch (const Error&) {
      if (!cut_off) throw;
    }
  }
  return rows;
}

std::vector<Json> History::read(const std::filesystem::path& folder, const Json& saved) {
  auto rows = read(folder);
  const auto have = rows.empty() ? 0 : iteration_of(rows.back());
  const auto number = saved.is_object() ? iteration_of(saved) : 0;
  if (number <= have) return rows;
  warn_of_missing(folder, have, number - 1);
  rows.push_back(saved);
  return rows;
}

History History::load(const std::filesystem::path& folder) {
  History history(folder);
  history.rows_ = read(folder);
  for (const auto& row : history.rows_) add_columns(history.columns_, row);
  return history;
}

void History::start(const AttemptStart& start) {
  for (auto& row : read(folder_))
    if (iteration_of(row) <= start.training_iteration) rows_.push_back(std::move(row));
  if (start.is_ancestor) remove_abandoned_rows(start);
  const auto have = rows_.empty() ? 0 : iteration_of(rows_.back());
  const auto& last = start.last_row;
  warn_of_missing(folder_, have, start.training_iteration - (last.is_object() ? 1 : 0));
  if (last.is_object()) {
    // Replace the row of the same report: it may come from a course of training whose checkpoint was lost, or a crash
    // may have made it incomplete.
    if (have == start.training_iteration && !rows_.empty()) rows_.pop_back();
    rows_.push_back(last);
  }
  for (const auto& row : rows_) add_columns(columns_, row);
  is_outdated_ = true;
}

void History::checkpoint(const Checkpoint&) {
  if (is_outdated_) rewrite("result.json and progress.csv do not hold this run's metrics yet: ");
}

void History::end() {
  if (is_outdated_) rewrite("result.json and progress.csv do not hold this run's metrics yet: ");
  if (is_outdated_ || rows_.empty()) return;
  try {
    for (const char* name : {run_names::history, run_names::table}) File(folder_ / name, File::Mode::write).sync();
  } catch (const Error& error) {
    log::warn(str("result.json and progress.csv are written again: ", error.what()));
    // Write the files anew even if they read as unchanged: a file that could not be synced may still be in memory only.
    rewrite("result.json and progress.csv may lose this run's last metrics: ", Unchanged::replaced);
  }
}

void History::remove_abandoned_rows(const AttemptStart& start) {
  const auto checkpoint_of = [](const Json& row) {
    const auto name = row.value("checkpoint_dir_name", Json());
    return name.is_string() ? name.get<std::string>() : std::string();
  };
  // Find the last report whose checkpoint is an ancestor of the one from which training resumes.
  const auto common = std::ranges::find_if(rows_.rbegin(), rows_.rend(), [&](const Json& row) {
    const auto name = checkpoint_of(row);
    return !name.empty() && start.is_ancestor(name);
  });
  const auto later = std::ranges::subrange(common.base(), rows_.end());
  const bool names_others = std::ranges::any_of(later, [&](const Json& row) { return !checkpoint_of(row).empty(); });
  if (start.was_given_up || names_others) rows_.erase(later.begin(), later.end());
}

void History::report(const Json& row, std::int64_t) {
  try {
    append(row);
  } catch (const Error& error) {
    log::warn(str("a row of the metrics could not be written: ", error.what()));
  }
}

void History::checkpoint_lost(const Checkpoint& checkpoint) {
  for (auto& row : rows_)
    if (row.value("checkpoint_dir_name", Json()) == checkpoint.path().filename().string())
      for (const char* key : {"checkpoint_dir_name", "checkpoint_name", "checkpoint_status"}) row.erase(key);
  rewrite("result.json still names a checkpoint that does not exist: ");
}

void History::validated(std::int64_t training_iteration, const Json& fields) {
  static_cast<void>(add_validation(training_iteration, fields));
}

bool History::add_validation(std::int64_t training_iteration, const Json& fields) {
  const auto row = std::ranges::find(rows_, training_iteration, iteration_of);
  if (row == rows_.end()) return false;
  auto with = *row;
  with.update(fields);
  if (with == *row) return false;
  *row = std::move(with);
  add_columns(columns_, *row);
  rewrite("the results of a validation could not be added to the metrics: ");
  return true;
}

void History::rewrite(const char* warning, Unchanged unchanged) noexcept {
  try {
    write_rows(unchanged);
    write_table(unchanged);
    is_outdated_ = false;
  } catch (const std::exception& error) {
    is_outdated_ = true;
    log::warn(str(warning, error.what()));
  }
}

void History::append(const Json& row) {
  rows_.push_back(row);
  const bool outdated = std::exchange(is_outdated_, true), has_new_columns = add_columns(columns_, row);
  outdated ? write_rows(Unchanged::kept) : append_to(folder_ / run_names::history, line_of(row));
  outdated || has_new_columns ? write_table(Unchanged::kept)
                              : append_to(folder_ / run_names::table, csv_line(row, columns_));
  is_outdated_ = false;
}

void History::write(const char* name, const std::string& text, Unchanged unchanged) const {
  const auto path = folder_ / name;
  std::error_code cannot_tell;
  if (unchanged == Unchanged::kept && std::filesystem::is_regular_file(status_of(path)) &&
      std::filesystem::hard_link_count(path, cannot_tell) == 1 && read_file(path) == text)
    return;
  write_file(path, text);
}

void History::write_rows(Unchanged unchanged) const {
  std::string text;
  for (const auto& row : rows_) text += line_of(row);
  write(run_names::history, text, unchanged);
}

void History::write_table(Unchanged unchanged) const {
  auto text = columns_.empty() ? std::string() : csv_header(columns_);
  for (const auto& row : rows_) text += csv_line(row, columns_);
  write(run_names::table, text, unchanged);
}

}  // namespace muster::detail::observe
