// params.json: the options that a run was started with. A restored run reads them.
#pragma once

#include "muster/trainer.hpp"

#include <filesystem>

namespace muster::detail::run {

/// Returns the options as in params.json, which has the fields of checkpoint_config and failure_config directly in
/// run_config.
Json params_from_options(const TrainerOptions& options);
/// Returns the options in params.json. Throws an Error (ExitCode::data) that names `file` and a missing key or invalid
/// value. Ignores unknown keys. Keys that earlier versions of muster did not write may be missing.
TrainerOptions options_from_params(const Json& params, const std::filesystem::path& file);

/// Returns the options that this run was started with. Throws an Error (ExitCode::data) if the run cannot be restored
/// because it has no valid params.json, or no intact checkpoint and no fast tier that may hold one.
TrainerOptions saved_options(const std::filesystem::path& run);
/// Like saved_options(), but options in `given` that differ from their defaults replace the saved ones; dataset_config
/// is replaced as a whole. The run's name and storage path are those of `run`.
TrainerOptions restored_options(const std::filesystem::path& run, TrainerOptions given);

}  // namespace muster::detail::run
