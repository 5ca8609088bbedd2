// What a training run ends with.
#pragma once

#include <muster/checkpoint.hpp>
#include <muster/error.hpp>
#include <muster/json.hpp>

#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

namespace muster {

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

  /// That of `error`; what Launch::run() gives main.
  ExitCode exit_code() const noexcept { return error ? error->code() : ExitCode::done; }
};

}  // namespace muster
