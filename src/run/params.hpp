// params.json: the options that a run was started with. They are read again when the run is restored.
#pragma once

#include "muster/trainer.hpp"

#include <filesystem>

namespace muster::detail::run {

/// The options as in params.json, where the fields of checkpoint_config and failure_config lie directly in run_config.
Json params_from_options(const TrainerOptions& options);
/// The options in params.json. Throws an Error (ExitCode::data) that names a missing key or an invalid value in `file`.
/// Ignores unknown keys. Keys that earlier versions did not write may be missing.
TrainerOptions options_from_params(const Json& params, const std::filesystem::path& file);

/// The options that the run in that folder was started with. Throws an Error (ExitCode::data) unless the run can be
/// restored, that is, has a params.json and a whole checkpoint.
TrainerOptions saved_options(const std::filesystem::path& run);
/// The same, overridden by the options in `given` that differ from their default.
TrainerOptions restored_options(const std::filesystem::path& run, TrainerOptions given);

}  // namespace muster::detail::run
