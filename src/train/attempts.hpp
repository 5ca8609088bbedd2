// Attempts of training, one after the other, until one ends well or no more are allowed.
#pragma once

#include "train/resolve.hpp"
#include "train/run_folder.hpp"

#include <c10/core/Device.h>

#include <optional>

namespace muster::detail::train {

/// Each attempt goes on from the newest checkpoint; FailureConfig says how many follow a failure. The error of the last
/// one, the same on all ranks; none where training is done. Collective over the launch.
std::optional<Error> train_with_retries(const Plan& plan, const RunFolder& run, at::Device device,
                                        const TrainLoop& train_loop);

}  // namespace muster::detail::train
