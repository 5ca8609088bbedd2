// The stretches of fit(), in their order; each is a file. All are collective over the launch, and what they throw is
// the same on all ranks.
#pragma once

#include "muster/result.hpp"
#include "train/resolve.hpp"
#include "train/run_folder.hpp"
#include "train/validation.hpp"

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <string>

namespace muster::detail::train {

/// Looks whether this rank has the device and the data that it needs, and whether all have the same data; gives its
/// device. A rank that only waits needs neither.
at::Device check_together(const Plan& plan);

/// TorchTrainer's backend.
std::shared_ptr<const BackendConfig> torch_backend(const TorchConfig& config);

/// Clears away what an interrupted job has left half written, writes params.json and says what begins. False, with a
/// message, where the run is finished and was asked for the same.
bool start(const Plan& plan, RunFolder& run);

/// How training has ended.
struct Ended {
  std::optional<Error> error = {};  ///< the same on all ranks; none where it is done
  Json returned = {};               ///< by the training function on this rank; null where it has not come to that
};

/// Attempts, one after the other, until one ends well or FailureConfig allows no more; each goes on from the newest
/// checkpoint. Ranks that do not train validate meanwhile. The last one's end.
Ended train_with_retries(const Plan& plan, const RunFolder& run, at::Device device, const TrainLoop& train_loop,
                         Validation& validation);

/// Notes in the folder that the run is finished, unless training has ended with an error, and reads the result, the
/// same on every rank. Where it cannot be read, the cause of the error comes first.
Result finish(const Plan& plan, RunFolder& run, const Ended& ended);

/// The result of a run that is finished already: what its folder holds now.
Result read_result(const Plan& plan, const RunFolder& run);

}  // namespace muster::detail::train
