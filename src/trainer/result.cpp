#include "base/file.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/inspect.hpp"
#include "comm/on_ranks.hpp"
#include "observe/csv.hpp"
#include "observe/history.hpp"
#include "observe/status_file.hpp"
#include "run/failures.hpp"
#include "run/params.hpp"
#include "trainer/fit.hpp"
#include "trainer/run_summary.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

namespace muster {
namespace detail::trainer {
namespace {

double score_of(const Json& metrics, const std::string& attribute, ScoreOrder order) {
  const auto value = metrics.is_object() ? metrics.value(attribute, Json()) : Json();
  if (!value.is_number()) return -std::numeric_limits<double>::infinity();
  return order == ScoreOrder::max ? value.get<double>() : -value.get<double>();
}

/// Returns the run's checkpoints, without rolled-back ones: the best score first, or without a score the newest first.
std::vector<CheckpointInfo> ranked_checkpoints(const std::filesystem::path& run, const CheckpointConfig& config) {
  auto all = checkpoint::intact_checkpoints(run, checkpoint::read_rollbacks(run));
  std::reverse(all.begin(), all.end());
  const auto& attribute = config.checkpoint_score_attribute;
  if (attribute.empty()) return all;
  const auto score = [&](const CheckpointInfo& info) {
    return score_of(info.metrics, attribute, config.checkpoint_score_order);
  };
  std::stable_sort(all.begin(), all.end(), [&](const auto& a, const auto& b) { return score(a) > score(b); });
  return all;
}

/// Returns what a Result needs from a run's folder.
Json content_of(const std::filesystem::path& run, const CheckpointConfig& config, const Json& params) {
  Json checkpoints = Json::array();
  const auto ranked = ranked_checkpoints(run, config);
  for (const auto& info : ranked) checkpoints.push_back({info.path.string(), info.metrics});
  const auto newest = std::ranges::max_element(ranked, {}, &CheckpointInfo::index);
  Json last_saved;  // null if the newest checkpoint was saved between two reports, since it has no row
  if (newest != ranked.end() && newest->metrics.contains("training_iteration")) {
    last_saved = newest->metrics;
    last_saved["checkpoint_dir_name"] = newest->path.filename().string();
  }
  return {{"history", observe::History::read(run, last_saved)},
          {"checkpoints", checkpoints},
          {"newest", newest == ranked.end() ? "" : newest->path.string()},
          {"return_value", params.is_object() ? params.value("return_value", Json()) : Json()}};
}

Result result_of(const std::filesystem::path& run, const Json& content) {
  Result result;
  result.path = run;
  result.metrics_history = content.at("history").get<std::vector<Json>>();
  if (!result.metrics_history.empty()) result.metrics = result.metrics_history.back();
  for (const auto& entry : content.at("checkpoints"))
    result.best_checkpoints.emplace_back(Checkpoint::from_directory(entry[0].get<std::string>()), entry[1]);
  if (const auto newest = content.at("newest").get<std::string>(); !newest.empty())
    result.checkpoint = Checkpoint::from_directory(newest);
  result.return_value = content.at("return_value");
  return result;
}

}  // namespace

Result finish_run(const run::ResolvedOptions& resolved, run::RunFolder& run, const TrainingOutcome& ended,
                  const std::optional<Error>& unfinished_validations) {
  if (!ended.error && resolved.world().rank() == 0) run.mark_finished(ended.return_value);
  Result result;
  try {
    result = read_result(resolved, run);
  } catch (const Error& unreadable) {
    if (!ended.error) throw;
    // Only a warning, since training's error is the cause. No warning if it is the same error: training reads the rows
    // at its start, too.
    if (std::string_view(unreadable.what()) != ended.error->what()) log::warn(unreadable.what());
    result.path = run.path();
  }
  result.error = ended.error ? ended.error : unfinished_validations;
  // If the start was refused, the rows are those of earlier starts.
  const bool is_refused = result.error && run::is_refusal(result.error->code());
  if (resolved.world().rank() == 0 && !is_refused) print_summary(resolved, result);
  return result;
}

void print_summary(const run::ResolvedOptions& resolved, const Result& result) {
  if (resolved.progress == Progress::none) return;
  const auto& config = resolved.options.run_config.checkpoint_config;
  std::fputs(run_summary(result, config, observe::read_status(result.path)).c_str(), stderr);
}

Result read_result(const run::ResolvedOptions& resolved, const run::RunFolder& run) {
  const auto content = comm::run_on_root(resolved.world(), [&] {
    return content_of(run.path(), resolved.options.run_config.checkpoint_config, run.params());
  });
  return result_of(run.path(), content);
}

}  // namespace detail::trainer

Result Result::from_path(const std::filesystem::path& path) {
  using namespace detail;
  const auto run = checkpoint::without_links(run::absolute_path(path));  // a link may be moved to another run meanwhile
  const auto file = run / "params.json", cause = run / "error.txt";
  if (!std::filesystem::exists(status_of(file)))
    throw Error(ExitCode::data, "reading the result of " + run.string(), "it has no params.json",
                "Name the folder of a run");
  const auto params = read_json(file);
  const auto options = run::options_from_params(params, file);
  const auto read = [&] {
    for (int tries_left = 100;; --tries_left) try {
        return trainer::result_of(run, trainer::content_of(run, options.run_config.checkpoint_config, params));
      } catch (const Error&) {
        // The run's job may prune a checkpoint after this process has listed it and before it is opened.
        if (tries_left == 0) throw;
      }
  };
  auto result = read();
  if (std::filesystem::exists(status_of(cause))) {
    auto text = read_file(cause, 1 << 20);
    while (text.ends_with('\n')) text.pop_back();
    result.error = Error(ExitCode::user_error, text);
  }
  return result;
}

std::optional<Checkpoint> Result::get_best_checkpoint(const std::string& metric, ScoreOrder mode) const {
  if (best_checkpoints.empty()) return {};
  const auto score = [&](const auto& reported) { return detail::trainer::score_of(reported.second, metric, mode); };
  const auto best = std::ranges::max_element(best_checkpoints, {}, score);
  if (best->second.is_object() && best->second.value(metric, Json()).is_number()) return best->first;
  throw Error(ExitCode::usage, "choosing the best checkpoint by \"" + metric + "\"",
              detail::str("none of the ", best_checkpoints.size(), " has it as a number"),
              "Report it with every checkpoint");
}

MetricsTable Result::metrics_table() const {
  MetricsTable table;
  for (const auto& row : metrics_history) detail::observe::add_columns(table.columns, row);
  for (const auto& row : metrics_history) {
    auto& values = table.rows.emplace_back();
    for (const auto& column : table.columns) values.push_back(row.value(column, Json()));
  }
  return table;
}

std::vector<double> MetricsTable::column(const std::string& name) const {
  const auto at = std::ranges::find(columns, name);
  if (at == columns.end())
    throw Error(ExitCode::usage, "taking the column \"" + name + "\"", "no report has it", "Take one of `columns`");
  const auto index = static_cast<std::size_t>(at - columns.begin());
  std::vector<double> numbers;
  for (const auto& row : rows) numbers.push_back(row[index].is_number() ? row[index].get<double>() : std::nan(""));
  return numbers;
}

}  // namespace muster
