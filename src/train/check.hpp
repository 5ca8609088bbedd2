// Everything that can be found wrong with a trainer before training begins.
#pragma once

#include "train/resolve.hpp"

#include <c10/core/Device.h>

#include <chrono>

namespace muster::detail::train {

/// How long the other ranks may take to hear of a failure after which nothing is tried again.
inline constexpr std::chrono::seconds final_grace{30};

/// Looks whether this worker has the device and the data that it needs, and whether all have the same data; gives its
/// device. The error is the same on all ranks. A rank that only waits needs neither. Collective over the launch.
at::Device check_together(const Plan& plan);

}  // namespace muster::detail::train
