#include "run_files.hpp"

#include "base/readable.hpp"
#include "base/row_fields.hpp"

#include <muster/error.hpp>

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <optional>
#include <utility>

namespace muster::tool {
namespace {

namespace fs = std::filesystem;

/// A run that trains on batches gives a sign of life every five seconds; after this time without one it is silent.
constexpr std::int64_t max_silence_s = 60;
/// From its start to its first batch, a run gives no sign of life; that may take this long.
constexpr std::int64_t max_start_s = 600;
/// Longer names of metrics are shortened in a table.
constexpr std::size_t max_metric_name = 24;

/// For Json::parse(): leaves out values that are nested so deeply that printing them would overflow the stack.
bool is_shallow(int depth, Json::parse_event_t, const Json&) { return depth < 256; }

/// Opens a file for reading. If there is no such file, returns a stream that is not open. Throws an Error
/// (ExitCode::data) if the file cannot be read.
std::ifstream open(const fs::path& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) return {};
  std::ifstream file;
  if (fs::is_regular_file(status)) file.open(path);
  if (!file.is_open())
    throw Error(ExitCode::data, "reading " + path.string(),
                error                         ? error.message()
                : fs::is_regular_file(status) ? std::strerror(errno)
                                              : "it is no regular file",
                "Check the path and the permissions");
  return file;
}

std::string value_text(const Json& value) {
  return value.is_number_float() ? detail::number_text(value.get<double>())
         : value.is_string()     ? value.get<std::string>()
                                 : value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// Returns the number at `key`; NaN if there is none.
double number_at(const Json& object, const std::string& key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return object.is_object() && found != object.end() && found->is_number() ? found->get<double>() : std::nan("");
}

std::string seconds_text(double seconds) {
  if (!(seconds < 1e10)) return "years";
  const auto rounded = static_cast<long long>(std::llround(seconds));
  if (rounded < 120) return detail::str(rounded, " s");
  if (rounded < 2 * 3600) return detail::str(rounded / 60, " min");
  if (rounded < 48 * 3600) return detail::str(rounded / 3600, " h");
  return detail::str(rounded / 86400, " d");
}

std::string text_at(const Json& object, const Json::json_pointer& path) {
  if (!object.is_object() || !object.contains(path)) return {};
  const auto& value = object.at(path);
  return value.is_string() ? value.get<std::string>() : std::string();
}

/// Returns the rows of result.json from report `iteration` on, the newest first; only those in the last MiB of the
/// file.
std::vector<Json> newest_rows(const fs::path& run, std::int64_t iteration) {
  constexpr std::streamoff most_bytes = 1 << 20;
  auto file = open(run / "result.json");
  if (!file.is_open() || !file.seekg(0, std::ios::end)) return {};
  const auto bytes = std::min<std::streamoff>(file.tellg(), most_bytes);
  std::string text(static_cast<std::size_t>(bytes), '\0');
  if (!file.seekg(-bytes, std::ios::end) || !file.read(text.data(), bytes)) return {};
  std::vector<Json> rows;
  for (auto end = text.rfind('\n'); end != text.npos && end > 0;) {
    const auto begin = text.rfind('\n', end - 1);
    const auto line = text.substr(begin == text.npos ? 0 : begin + 1, end - (begin == text.npos ? 0 : begin + 1));
    end = begin;
    auto row = Json::parse(line, is_shallow, false);
    if (!row.is_object()) continue;
    rows.push_back(std::move(row));
    if (count_at(rows.back(), "training_iteration") <= iteration) break;
  }
  return rows;
}

/// Returns the rows that a summary needs, oldest first: all rows; but if status.json has the best value of earlier
/// rows, that value and the newest rows. Sets `count` to the number of reports.
std::vector<Json> rows_for_summary(const fs::path& run, const Json& status, std::int64_t& count) {
  const auto best = status.is_object() ? status.value("best", Json()) : Json();
  const auto reported = status.is_object() ? count_at(status, "training_iteration") : 0;
  if (best.is_object() && reported > 0) {
    auto rows = newest_rows(run, reported);
    if (!rows.empty()) {
      count = count_at(rows.front(), "training_iteration");
      rows.push_back(best);
      std::ranges::reverse(rows);
      return rows;
    }
  }
  auto rows = Reports(run).read_new();
  count = static_cast<std::int64_t>(rows.size());
  return rows;
}

std::string best_of(const Json& params, const std::vector<Json>& reports) {
  using namespace nlohmann::json_literals;
  const auto score = text_at(params, "/run_config/checkpoint_score_attribute"_json_pointer);
  const bool is_max = text_at(params, "/run_config/checkpoint_score_order"_json_pointer) != "min";
  if (!score.empty()) {
    double best = std::nan("");
    for (const auto& row : reports)
      if (const double value = number_at(row, score);
          !std::isnan(value) && (std::isnan(best) || (is_max ? value > best : value < best)))
        best = value;
    return std::isnan(best) ? "" : score.substr(0, max_metric_name) + " " + detail::number_text(best);
  }
  for (auto row = reports.rbegin(); row != reports.rend(); ++row)
    for (const auto& [name, value] : row->items())
      if (!detail::is_row_field(name) && value.is_number())
        return name.substr(0, max_metric_name) + " " + detail::number_text(value.get<double>());
  return {};
}

/// Returns when the last job has taken the run's folder, in seconds since 1970; none if that job has ended well. A job
/// writes .lock when it takes the folder, and empties it when it ends well.
std::optional<std::int64_t> start_of_holder(const fs::path& run) {
  struct stat status {};
  if (::stat((run / ".lock").c_str(), &status) != 0 || status.st_size == 0) return {};
  return status.st_mtim.tv_sec;
}

}  // namespace

std::int64_t count_at(const Json& object, const std::string& key) {
  const double value = number_at(object, key);
  return std::isnan(value) || std::abs(value) > 1e15 ? 0 : static_cast<std::int64_t>(value);
}

std::string default_storage() {
  const char* const storage = std::getenv("MUSTER_STORAGE");
  return storage == nullptr || *storage == '\0' ? "runs" : storage;
}

Json read_json(const fs::path& path) {
  auto file = open(path);
  auto value = file.is_open() ? Json::parse(file, is_shallow, false) : Json();
  return value.is_discarded() ? Json() : value;
}

std::vector<Json> Reports::read_new() {
  struct stat status {};
  if (::stat(file_.c_str(), &status) != 0) return {};
  std::size_t skipped = 0;  // number of rows to read again without returning them
  if (status.st_ino != inode_ || status.st_size < bytes_read_) {
    inode_ = status.st_ino;
    bytes_read_ = 0;
    skipped = std::exchange(row_count_, 0);
  }
  auto file = open(file_);
  std::vector<Json> rows;
  if (!file.is_open() || !file.seekg(bytes_read_)) return rows;
  for (std::string line; std::getline(file, line);) {
    if (file.eof()) break;  // an incomplete line is read again later
    bytes_read_ += static_cast<std::streamoff>(line.size()) + 1;
    auto row = Json::parse(line, is_shallow, false);
    if (!row.is_object()) continue;
    if (row_count_++ >= skipped) rows.push_back(std::move(row));
  }
  return rows;
}

bool may_go_on(const std::string& state) { return state == "starting" || state == "training" || state == "silent"; }

std::string state_of(const fs::path& run, const Json& status, std::int64_t reported) {
  const auto params = read_json(run / "params.json");
  if (params.is_object() && params.value("finished", Json(false)) == true) return "finished";
  const auto state = text_at(status, Json::json_pointer("/state"));
  const auto now = std::time(nullptr);
  const auto sign_of_life = std::max(count_at(status, "updated"), reported);
  const auto start = start_of_holder(run);
  // A job that has just begun to report may not have written status.json yet; the file is then from an earlier job.
  const bool reports_first = start && *start >= count_at(status, "updated") && reported > *start;
  if ((state == "training" || reports_first) && now - sign_of_life <= max_silence_s) return "training";
  if (start && *start >= sign_of_life && now - *start <= max_start_s) return "starting";
  if (state == "finished" || state == "stopped" || state == "failed") return state;
  std::error_code ignored;
  return state.empty() && fs::exists(run / "error.txt", ignored) ? "failed" : "silent";
}

RunSummary summary_of(const fs::path& run) {
  RunSummary summary{.path = run, .status = read_json(run / "status.json")};
  const auto reports = rows_for_summary(run, summary.status, summary.reports);
  const auto reported = reports.empty() ? 0 : count_at(reports.back(), "timestamp");
  summary.state = state_of(run, summary.status, reported);
  summary.best = best_of(read_json(run / "params.json"), reports);
  if (summary.status.is_object()) {
    summary.epoch = std::to_string(count_at(summary.status, "epoch") + 1);
    if (const auto epochs = count_at(summary.status, "epochs"); epochs > 0) summary.epoch += detail::str("/", epochs);
    summary.updated = std::max(count_at(summary.status, "updated"), reported);
  } else if (!reports.empty()) {
    summary.updated = reported;
  }
  return summary;
}

Json to_json(const RunSummary& summary) {
  return {{"path", summary.path.string()}, {"state", summary.state},
          {"epoch", summary.epoch},        {"reports", summary.reports},
          {"best", summary.best},          {"updated", summary.updated < 0 ? Json() : Json(summary.updated)},
          {"status", summary.status}};
}

std::string progress_text(const Json& status) {
  std::string text = detail::str("epoch ", count_at(status, "epoch") + 1);
  if (const auto epochs = count_at(status, "epochs"); epochs > 0) text += detail::str("/", epochs);
  if (const auto samples = count_at(status, "samples"); samples > 0)
    text += detail::str("  ", std::clamp<std::int64_t>(count_at(status, "consumed"), 0, samples) * 100 / samples, "%");
  text += detail::str("  step ", count_at(status, "global_step"));
  if (const double rate = number_at(status, "samples_per_s"); !std::isnan(rate))
    text += "  " + detail::number_text(rate) + " samples/s";
  if (const double left = number_at(status, "run_s_left"); !std::isnan(left))
    text += "  " + seconds_text(left) + " left";
  else if (const double in_epoch = number_at(status, "epoch_s_left"); !std::isnan(in_epoch))
    text += "  " + seconds_text(in_epoch) + " left in the epoch";
  return text;
}

std::string time_text(const Json& status) {
  if (!status.is_object() || !status.contains("time")) return {};
  const auto& time = status.at("time");
  const auto seconds = [&](const char* key) {
    const double value = number_at(time, key);
    return std::isnan(value) ? 0.0 : std::max(value, 0.0);
  };
  const double total = seconds("training_s") + seconds("starting_s");
  if (total <= 0) return {};
  struct Part {
    const char* name;
    double seconds;
  };
  double useful = seconds("training_s");
  const std::array<Part, 5> parts{{{"steps done again", seconds("repeated_s")},
                                   {"saving", seconds("saves_s")},
                                   {"waiting for data", seconds("data_s")},
                                   {"waiting for late ranks", seconds("late_s")},
                                   {"starting", seconds("starting_s")}}};
  for (std::size_t part = 0; part < 4; ++part) useful -= parts[part].seconds;
  const auto starts = status.value("starts", Json());
  const auto count = starts.is_array() ? starts.size() : 1;
  const auto share = [&](double part) { return detail::formatted("%5.1f%%", 100 * part / total); };
  std::string text = detail::str("time: ", seconds_text(total), " in ", detail::counted(count, "start"), "\n  ",
                                 share(std::max(useful, 0.0)), "  useful steps\n");
  for (const auto& part : parts)
    if (part.seconds >= total / 2000)
      text += "  " + share(part.seconds) + "  " + part.name + ", " + seconds_text(part.seconds) + "\n";
  if (const double idle = seconds("idle_s"); idle >= 1)
    text += "  besides, no job ran for " + seconds_text(idle) + "\n";
  return text;
}

std::string metrics_text(const Json& row) {
  std::string text;
  for (const auto& [name, value] : row.items())
    if (!detail::is_row_field(name)) text += (text.empty() ? "" : ", ") + name + " " + value_text(value);
  return text;
}

std::string report_text(const Json& row) {
  std::string text = detail::str("report ", count_at(row, "training_iteration"), ":");
  for (const auto& [name, value] : row.items())
    if (!detail::is_row_field(name) || name == "checkpoint_dir_name")
      text += " " + (name == "checkpoint_dir_name" ? "" : name + " ") + value_text(value);
  return text;
}

std::string age_text(std::int64_t updated) {
  if (updated < 0) return "never";
  const auto age = std::max<std::int64_t>(std::time(nullptr) - updated, 0);
  return age < 2 ? "just now" : seconds_text(static_cast<double>(age)) + " ago";
}

}  // namespace muster::tool
