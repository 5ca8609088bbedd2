// The device of a rank.
#pragma once

#include "base/export.hpp"

#include <c10/core/Device.h>

namespace muster {
class Launch;
}

namespace muster::detail::run {

/// The CPU, or with `use_gpu` this rank's GPU of its node. Throws an Error (ExitCode::data) if the node has no GPU.
MUSTER_INTERNAL_API at::Device choose_device(bool use_gpu, const Launch& launch);

}  // namespace muster::detail::run
