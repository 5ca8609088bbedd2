// The result of a training run.
#pragma once

#include <muster/checkpoint.hpp>
#include <muster/config.hpp>
#include <muster/detail/export.hpp>
#include <muster/error.hpp>
#include <muster/json.hpp>

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster {

/// All reports of a run: a row for each report, and a column for each name in any of them, in the order of
/// progress.csv.
struct MUSTER_API MetricsTable {
  std::vector<std::string> columns = {};
  /// Each row has a value for every column; null if the report had none.
  std::vector<std::vector<Json>> rows = {};

  /// The numbers of a column, by row; NaN where there is no number. An Error (ExitCode::usage) if there is no such
  /// column.
  std::vector<double> column(const std::string& name) const;
};

/// What fit() returns, the same on every rank.
struct MUSTER_API Result {
  /// The metrics of the last report, as in the last line of result.json; null if there was none.
  Json metrics;
  /// The newest intact checkpoint that was not rolled back; empty if there is none.
  std::optional<Checkpoint> checkpoint;
  /// The run's folder, STORAGE/NAME.
  std::filesystem::path path;
  /// Why training ended early, or why validations are still pending; empty on success.
  std::optional<Error> error;
  /// The intact checkpoints still on disk, without rolled-back ones, with their reports' metrics: best first with a
  /// score attribute, otherwise newest first.
  std::vector<std::pair<Checkpoint, Json>> best_checkpoints;
  /// Every report, oldest first.
  std::vector<Json> metrics_history;
  /// What the training function returned on rank 0; null if it returns nothing, or if an exception has ended it: a
  /// failure, a stop, or the end by a callback.
  Json return_value;

  /// The code of `error`; Launch::run() returns it to main.
  ExitCode exit_code() const noexcept { return error ? error->code() : ExitCode::done; }

  /// The checkpoint in best_checkpoints whose report had the best value of `metric`; empty if there are no checkpoints.
  /// An Error (ExitCode::usage) if none of them has the metric as a number.
  std::optional<Checkpoint> get_best_checkpoint(const std::string& metric, ScoreOrder mode) const;
  /// metrics_history as columns and rows.
  MetricsTable metrics_table() const;

  /// The result of a run that is over, read from its folder by this process alone, without a Launch. If the run has
  /// failed, `error` has ExitCode::user_error and the text that the run has left. Throws an Error (ExitCode::data) if
  /// `path` is not a run's folder.
  static Result from_path(const std::filesystem::path& path);
};

}  // namespace muster
