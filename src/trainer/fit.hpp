// The phases of fit(), in their order; each is a file. All are collective over the launch, and throw the same on all
// ranks.
#pragma once

#include "base/export.hpp"
#include "muster/result.hpp"
#include "run/resolve.hpp"
#include "run/run_folder.hpp"
#include "session/validation.hpp"

#include <c10/core/Device.h>

#include <memory>
#include <optional>

namespace muster::detail::trainer {

/// Checks that this rank has its device and its data, and that all ranks have the same data. Returns the device. A rank
/// that neither trains nor validates needs neither.
MUSTER_INTERNAL_API at::Device check_device_and_data(const run::ResolvedOptions& resolved);

/// The backend of TorchTrainer.
MUSTER_INTERNAL_API std::shared_ptr<const BackendConfig> torch_backend(const TorchConfig& config);

/// Writes params.json and logs what begins. Returns false, with a message, if the run is finished already and has the
/// same configuration; then it removes unfinished checkpoints of an interrupted job.
MUSTER_INTERNAL_API bool begin_run(const run::ResolvedOptions& resolved, run::RunFolder& run);

/// How training has ended.
struct TrainingOutcome {
  std::optional<Error> error = {};  ///< the same on all ranks; none on success
  Json return_value = {};           ///< the training function's return value on this rank; null if it did not return
};

/// Trains, again after each failure, until an attempt succeeds or FailureConfig allows no more. Each attempt goes on
/// from the newest checkpoint. Ranks that do not train validate meanwhile. Returns how the last attempt has ended.
TrainingOutcome train_with_retries(const run::ResolvedOptions& resolved, const run::RunFolder& run, at::Device device,
                                   const TrainLoop& train_loop, session::Validation& validation);

/// Marks the run as finished in its folder, unless training has ended with an error, and reads the result, the same on
/// every rank. If training has failed and the result cannot be read, the returned error is training's; with validations
/// that are left it is `unfinished_validations`. Rank 0 prints the summary.
Result finish_run(const run::ResolvedOptions& resolved, run::RunFolder& run, const TrainingOutcome& ended,
                  const std::optional<Error>& unfinished_validations);

/// Prints the summary of a run that has ended to standard error, unless its progress is not shown. Rank 0 calls this.
MUSTER_INTERNAL_API void print_summary(const run::ResolvedOptions& resolved, const Result& result);

/// Reads the result from the folder of a run that is finished already.
MUSTER_INTERNAL_API Result read_result(const run::ResolvedOptions& resolved, const run::RunFolder& run);

}  // namespace muster::detail::trainer
