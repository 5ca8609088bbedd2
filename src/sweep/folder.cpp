#include "sweep/folder.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "observe/csv.hpp"
#include "run/failures.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <string>

namespace muster::detail::sweep {
namespace {

constexpr std::array statuses{"waiting", "running", "done", "stopped by the scheduler", "failed"};

std::filesystem::path file_of(const std::filesystem::path& trial) { return trial / run_names::trial; }

std::string dumped(const Json& json) { return json_text_lossy(json, 2) + "\n"; }

void add_settings(const Json& value, const std::string& name, Settings& all) {
  if (!value.is_object()) return static_cast<void>(all.emplace_back(name, value));
  for (const auto& [key, child] : value.items()) add_settings(child, name.empty() ? key : name + "." + key, all);
}

/// Returns the trial's checkpoint; none if it was removed or is being removed now.
std::optional<Checkpoint> checkpoint_at(const std::filesystem::path& path, const std::filesystem::path& trial) try {
  // A checkpoint of the trial's own run is looked up in the trial's present folder, since the sweep may have been moved
  // or copied.
  const bool own = path.parent_path().filename() == trial.filename();
  return Checkpoint::from_directory(own ? trial / path.filename() : path);
} catch (const Error&) {
  return {};
}

}  // namespace

std::string name_of(int trial) { return trial_prefix + formatted("%05d", trial); }

const char* text_of(TrialStatus status) noexcept { return statuses[static_cast<std::size_t>(status)]; }

Settings settings_of(const Config& config) {
  Settings all;
  add_settings(config, "", all);
  return all;
}

Json to_json(const Trial& trial) {
  return {{"trial", trial.name},
          {"status", text_of(trial.status)},
          {"config", trial.config},
          {"metrics", trial.metrics},
          {"checkpoint", trial.checkpoint ? Json(trial.checkpoint->path().string()) : Json()},
          {"error", trial.error ? Json(trial.error->what()) : Json()},
          {"exit_code", trial.error ? Json(static_cast<int>(trial.error->code())) : Json()}};
}

Trial trial_of(const Json& row, const std::filesystem::path& folder, const std::string& doing) try {
  Trial trial{.name = row.at("trial"), .config = row.at("config"), .metrics = row.at("metrics"), .path = folder};
  const auto status = std::find(statuses.begin(), statuses.end(), row.at("status").get<std::string>());
  if (status == statuses.end())
    throw Error(ExitCode::data, doing, "it has the status " + json_text(row.at("status")),
                "Remove it: the trial goes on");
  trial.status = static_cast<TrialStatus>(status - statuses.begin());
  if (const auto& path = row.at("checkpoint"); !path.is_null())
    trial.checkpoint = checkpoint_at(path.get<std::string>(), folder);
  if (const auto& text = row.at("error"); !text.is_null())
    trial.error = Error(static_cast<ExitCode>(row.at("exit_code").get<int>()), text.get<std::string>());
  return trial;
} catch (const Json::exception& error) {
  throw Error(ExitCode::data, doing, error.what(), "Remove it: the trial goes on from its newest checkpoint");
}

run::RunPoints points_of(const std::filesystem::path& trial) {
  return std::filesystem::exists(status_of(trial)) ? run::points_of(trial) : run::RunPoints();
}

void write_trial(const Trial& trial, const LostStarts& lost_starts) {
  if (const auto sweep = trial.path.parent_path(); !std::filesystem::exists(status_of(sweep)))
    throw Error(ExitCode::usage, "writing into the sweep " + sweep.string(),
                "the folder was moved away or removed while the job runs",
                "Start again with the --storage and --name of the folder to go on with");
  make_directories(trial.path);
  require_own_directory(trial.path);
  auto row = to_json(trial);
  row["losses"] = {
      {"count", lost_starts.count}, {"furthest", to_json(lost_starts.furthest)}, {"alone", lost_starts.alone}};
  write_file(file_of(trial.path), dumped(row));
}

LostStarts read_lost_starts(const std::filesystem::path& trial) {
  const auto file = file_of(trial);
  if (!std::filesystem::exists(status_of(file))) return {};
  const auto row = read_json(file);
  if (!row.is_object() || !row.contains("losses")) return {};  // an older version of muster has written it
  try {
    const auto& lost_starts = row.at("losses");
    return {lost_starts.at("count"), run::points_from(lost_starts.value("furthest", Json::object())),
            lost_starts.at("alone")};
  } catch (const Json::exception& error) {
    throw Error(ExitCode::data, "reading " + file.string(), error.what(),
                "Remove it: the trial goes on from its newest checkpoint");
  }
}

std::optional<Trial> read_trial(const std::filesystem::path& trial) {
  const auto file = file_of(trial);
  if (!std::filesystem::exists(status_of(file))) return {};
  return trial_of(read_json(file), trial, "reading " + file.string());
}

void write_tables(const std::filesystem::path& sweep, const std::vector<Trial>& trials, Json about) {
  auto& rows = about["trials"] = Json::array();
  std::vector<std::string> columns{"trial", "status"};
  std::vector<Json> lines;
  // Names of metrics in any row. A setting with such a name becomes config.NAME in all rows, so that each column has
  // one meaning.
  std::set<std::string> taken{"trial", "status", "checkpoint", "error"};
  for (const auto& trial : trials)
    if (trial.metrics.is_object())
      for (const auto& [name, value] : trial.metrics.items()) taken.insert(name);
  for (const auto& trial : trials) {
    rows.push_back(to_json(trial));
    Json line{{"trial", trial.name}, {"status", text_of(trial.status)}};
    for (const auto& [name, value] : settings_of(trial.config))
      line[taken.contains(name) ? "config." + name : name] = value;
    if (trial.metrics.is_object()) line.insert(trial.metrics.begin(), trial.metrics.end());
    // The user may have a metric with one of these names: it is only replaced if there is a value.
    for (const char* key : {"checkpoint", "error"})
      if (const auto& value = rows.back()[key]; !value.is_null() || !line.contains(key)) line[key] = value;
    observe::add_columns(columns, line);
    lines.push_back(std::move(line));
  }
  write_file(sweep / table_file, dumped(about));
  auto text = observe::csv_header(columns);
  for (const auto& line : lines) text += observe::csv_line(line, columns);
  write_file(sweep / run_names::sweep_table, text);
}

}  // namespace muster::detail::sweep
