// What a rank computes on.
#pragma once

#include <c10/core/Device.h>

namespace muster {
class Launch;
}

namespace muster::detail::train {

/// The CPU, or of the GPUs of this rank's node the one that is its own; an Error (ExitCode::data) where there is none.
at::Device choose_device(bool use_gpu, const Launch& launch);

}  // namespace muster::detail::train
