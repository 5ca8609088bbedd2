// The result of a run: what its folder holds now.
#pragma once

#include "muster/result.hpp"
#include "train/resolve.hpp"
#include "train/run_folder.hpp"

#include <optional>

namespace muster::detail::train {

/// Notes in the folder that the run is finished, unless training has ended with an error, and reads the result, the
/// same on every rank. Where it cannot be read, the cause in `error` comes first. Collective over the launch.
Result finish(const Plan& plan, RunFolder& run, const std::optional<Error>& error);

/// Of a run that is finished already. Collective over the launch.
Result read_result(const Plan& plan, const RunFolder& run);

}  // namespace muster::detail::train
