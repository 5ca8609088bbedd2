// What a training run ends with.
#pragma once

#include <muster/checkpoint.hpp>
#include <muster/config.hpp>
#include <muster/error.hpp>
#include <muster/json.hpp>

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster {

/// Every report of a run: a row for each, a column for each name that any of them has, in the order of progress.csv.
struct MetricsTable {
  std::vector<std::string> columns = {};
  /// As many values as there are columns; null where a report had none.
  std::vector<std::vector<Json>> rows = {};

  /// The numbers of a column, by row; NaN where there is none. An Error (ExitCode::usage) if there is no such column.
  std::vector<double> column(const std::string& name) const;
};

/// The same on every rank.
struct Result {
  /// Those of the last report, as in the last line of result.json; null if there was none.
  Json metrics;
  /// The last one committed.
  std::optional<Checkpoint> checkpoint;
  /// STORAGE/NAME.
  std::filesystem::path path;
  /// Why training ended early.
  std::optional<Error> error;
  /// The checkpoints still on disk with their reports' metrics: best first with a score attribute, else newest first.
  std::vector<std::pair<Checkpoint, Json>> best_checkpoints;
  /// Every report, oldest first.
  std::vector<Json> metrics_history;
  /// What the training function has returned on rank 0; null where it returns nothing, has failed, or a callback has
  /// ended it.
  Json return_value;

  /// That of `error`; what Launch::run() gives main.
  ExitCode exit_code() const noexcept { return error ? error->code() : ExitCode::done; }

  /// That of best_checkpoints whose report was best by that number; none if there are no checkpoints. An Error
  /// (ExitCode::usage) if none of them has it.
  std::optional<Checkpoint> get_best_checkpoint(const std::string& metric, ScoreOrder mode) const;
  /// metrics_history as columns and rows.
  MetricsTable metrics_table() const;

  /// That of a run which is over, read from its folder by this process alone: no Launch is needed. What it failed with
  /// is of ExitCode::user_error here. An Error (ExitCode::data) if `path` is not a run's folder.
  static Result from_path(const std::filesystem::path& path);
};

}  // namespace muster
