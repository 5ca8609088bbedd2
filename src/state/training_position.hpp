// Where training was when a checkpoint was made; the key "progress" of the checkpoint's manifest.
#pragma once

#include "base/export.hpp"
#include "muster/json.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace muster::detail::state {

/// The position of training in a checkpoint.
struct TrainingPosition {
  bool is_from_run = false;  ///< false for a checkpoint that no run has made; then all other fields have their defaults
  std::int64_t training_iteration = 0;
  std::int64_t epoch = 0;
  bool epoch_complete = true;
  bool epoch_counted = true;     ///< session.epochs() or the training function has begun to count epochs
  bool several_reports = false;  ///< an epoch had training between two reports with a State; see session::EpochEnd
  std::int64_t passes_before_more = 0;  ///< most passes of an epoch that was saved as complete and then went on
  std::int64_t global_step = 0;
  std::int64_t samples_since_report = 0;  ///< not 0 if the checkpoint was made between two reports
  double time_total_s = 0;
  std::uint64_t seed = 0;
  int threads_per_worker = 0;                  ///< threads of torch; 0 in checkpoints of older versions
  std::map<std::string, Json> positions = {};  ///< by name of the dataset or loader; see data/passes/pass_positions.hpp
  Json preprocessor = {};                      ///< the preprocessor's state, which may be null
  std::optional<bool> has_preprocessor = {};   ///< whether there was one; empty in checkpoints of older versions
  Json callbacks = {};                         ///< states of callbacks by name
};

Json to_json(const TrainingPosition& position);
/// Reads a position. Missing keys get their defaults; unknown keys are ignored. Throws an Error (ExitCode::data) for a
/// wrong type, a value out of range, or values that contradict each other.
MUSTER_INTERNAL_API TrainingPosition training_position_from_json(const Json& json);

}  // namespace muster::detail::state
