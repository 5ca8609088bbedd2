// Where training stood when a checkpoint was made: "progress" in its manifest.
#pragma once

#include "muster/json.hpp"

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

namespace muster::detail::checkpoint {

struct TrainerState {
  bool of_a_run = false;  ///< false for a checkpoint that no report made, which has none of the rest
  std::int64_t training_iteration = 0;
  std::int64_t epoch = 0;
  bool epoch_complete = true;
  bool epoch_counted = true;     ///< by session.epochs(), or by the training function; false before
  bool several_reports = false;  ///< of a State in one epoch, over data that muster does not know
  std::int64_t global_step = 0;
  std::int64_t samples_since_report = 0;  ///< where it was made between two reports
  double time_total_s = 0;
  std::uint64_t seed = 0;
  std::map<std::string, Json> positions = {};  ///< by dataset or loader; see data
  Json preprocessor = {};
  Json callbacks = {};  ///< their states by name
};

Json to_json(const TrainerState& state);
/// Keys that are missing have their default, others than these are left alone. An Error (ExitCode::data) says what
/// cannot be: a type, a range, or two values beside each other.
TrainerState trainer_state_from_json(const Json& json);
/// The preprocessor's state in a published checkpoint; null if it has none.
Json preprocessor_state(const std::filesystem::path& checkpoint);

}  // namespace muster::detail::checkpoint
