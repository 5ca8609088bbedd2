// params.json: the options that a run was started with, read again when it is restored.
#pragma once

#include "muster/trainer.hpp"

#include <filesystem>

namespace muster::detail::train {

/// The options as params.json has them: the parts of run_config lie in it without names of their own.
Json params_of(const TrainerOptions& options);
/// And back. An Error (ExitCode::data) names what is missing or cannot be in `file`. Keys that are unknown are left
/// alone; those of later versions may be missing.
TrainerOptions options_in(const Json& params, const std::filesystem::path& file);

/// What the run in that folder was started with. An Error (ExitCode::data) unless it can be restored: it has a
/// params.json and a whole checkpoint.
TrainerOptions saved_options(const std::filesystem::path& run);
/// The same, of which wins what `given` sets to other than its default.
TrainerOptions restored_options(const std::filesystem::path& run, TrainerOptions given);

}  // namespace muster::detail::train
