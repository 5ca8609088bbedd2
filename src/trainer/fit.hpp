// The phases of fit(), in their order; each is in a file of its own. All functions are collective over the launch and
// throw the same on all ranks, unless they say otherwise.
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

/// Checks that this rank has its device and its data, and that all ranks that need data have the same. Arranges that
/// ranks of a node share decoded chunks. Returns the device. A rank that neither trains nor validates needs no device
/// and no data.
MUSTER_INTERNAL_API at::Device check_device_and_data(const run::ResolvedOptions& resolved);

/// Returns the backend of TorchTrainer. Not collective.
MUSTER_INTERNAL_API std::shared_ptr<const BackendConfig> torch_backend(const TorchConfig& config);

/// Writes params.json, removes error.txt and logs the start. With --resume auto, returns false, with a message, if the
/// run is already finished and had the same train_loop_config; then it only removes error.txt and unfinished
/// checkpoints of an interrupted job.
MUSTER_INTERNAL_API bool begin_run(const run::ResolvedOptions& resolved, run::RunFolder& run);

/// How training has ended.
struct TrainingOutcome {
  std::optional<Error> error = {};  ///< the same on all ranks; none on success
  Json return_value = {};           ///< the training function's return value on this rank; null if it has returned none
};

/// Trains, again after each failure that is worth a retry, until an attempt succeeds, the run is stopped, or
/// FailureConfig or --max-failures allows no more attempts. Each attempt resumes from the newest checkpoint. An attempt
/// that ends to go back because of bad gradients (BadNumbers::roll_back) is no failure. Ranks that do not train
/// validate meanwhile. Returns how the last attempt has ended.
TrainingOutcome train_with_retries(const run::ResolvedOptions& resolved, const run::RunFolder& run, at::Device device,
                                   const TrainLoop& train_loop, session::Validation& validation);

/// If training has succeeded, marks the run as finished in its folder. Reads the result, the same on every rank. Rank 0
/// prints the summary, unless the start was refused. The result's error is that of training, even if the folder cannot
/// be read; if training has succeeded, it is `unfinished_validations`.
Result finish_run(const run::ResolvedOptions& resolved, run::RunFolder& run, const TrainingOutcome& ended,
                  const std::optional<Error>& unfinished_validations);

/// Prints the summary of a run that has ended to standard error, unless progress output is switched off. Not
/// collective; for rank 0.
MUSTER_INTERNAL_API void print_summary(const run::ResolvedOptions& resolved, const Result& result);

/// Reads a run's result from its folder; its `error` stays empty.
MUSTER_INTERNAL_API Result read_result(const run::ResolvedOptions& resolved, const run::RunFolder& run);

}  // namespace muster::detail::trainer
