// Validation beside training: a function that evaluates a checkpoint while the workers continue training.
//
//   muster::Metrics validate(muster::Session& session, const muster::Checkpoint& checkpoint) {
//     Net net;
//     checkpoint.load("model", net);
//     net->to(session.get_device());
//     net->eval();
//     muster::Mean accuracy;
//     for (auto& batch : session.get_dataset_shard("test").iter_torch_batches({.batch_size = 250}))
//       accuracy.add(net->forward(batch["image"]).argmax(1).eq(batch["label"]).to(torch::kFloat).mean(), batch.size());
//     return {{"val_accuracy", accuracy}};
//   }
//
//   // With mpirun -n 8, two ranks validate.
//   muster::TorchTrainer trainer(launch, train, {.scaling_config = {.num_workers = 6},
//                                                .validation = {.function = validate, .timeout = 10min}});
//   session.report(metrics, state, {.validation = true});        // in train
//
// Ranks that do not train run validations, with their own communicator: one checkpoint after the other, oldest first,
// each as soon as it is committed, and no worker waits. When training has ended, these ranks finish the validation that
// is running, and all ranks together run the rest. If every rank trains, or only one thread may call MPI, all
// validations run after training. A run that is asked to stop begins only validations that should end before its time
// is over. The others are pending, and run when the run is started again. If training was done, the job ends with
// ExitCode::stopped, so that it is started again. Validations that a lost job had begun are pending, too.
//
// The function's metrics are reduced over the ranks as in Session::report(), written to validation.json in the
// checkpoint's folder, and added to the row of its report, where they replace reported metrics of the same name.
// CheckpointConfig::checkpoint_score_attribute may name such a metric, and a checkpoint is not deleted while its
// validation is pending and the trainer has a validation function. The row's "checkpoint_status" has the validation's
// status. If the function throws, or takes longer than `timeout`, there is a warning, and the row has null for the
// metrics that earlier validations returned.
#pragma once

#include <muster/checkpoint.hpp>
#include <muster/config.hpp>
#include <muster/detail/export.hpp>
#include <muster/json.hpp>
#include <muster/metrics.hpp>

#include <chrono>
#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>

namespace muster {

class Session;

/// The function that validates: any callable Metrics(Session&, const Checkpoint&), or one that returns a Config. It is
/// called on every rank that validates, on a separate thread if several threads may call MPI.
///
/// The session's ranks are those that validate, and every dataset is split among them: a Mean is weighted by its
/// samples, other numbers have equal weights. No gradients are recorded. The session is for evaluation only: to report,
/// restore, stop or count epochs is an Error (ExitCode::usage).
class MUSTER_API ValidationFunction {
 public:
  ValidationFunction() = default;
  template <class Function>
  requires(std::invocable<Function&, Session&, const Checkpoint&> && !std::same_as<Function, ValidationFunction>)
      ValidationFunction(Function validate)
      : function_([validate = std::move(validate)](Session& session, const Checkpoint& checkpoint) mutable -> Metrics {
          using Given = std::remove_cvref_t<std::invoke_result_t<Function&, Session&, const Checkpoint&>>;
          if constexpr (std::same_as<Given, Config>)
            return to_metrics(validate(session, checkpoint));
          else
            return validate(session, checkpoint);
        }) {}

  Metrics operator()(Session& session, const Checkpoint& checkpoint) const { return function_(session, checkpoint); }
  explicit operator bool() const noexcept { return static_cast<bool>(function_); }

 private:
  static Metrics to_metrics(const Config& values);

  std::function<Metrics(Session&, const Checkpoint&)> function_ = {};
};

struct ValidationConfig {
  ValidationFunction function = {};
  /// The longest time for one validation. When this time is over, the validation is given up, and its ranks validate
  /// nothing more in this job. If no rank is left for later validations, these are pending, and the job ends with
  /// ExitCode::stopped. A function that still does not return keeps running on its thread: when main returns on that
  /// rank, the process ends without the destructors of static objects. If only one thread may call MPI, there is no
  /// timeout.
  std::chrono::milliseconds timeout = std::chrono::hours(1);
};
MUSTER_API void to_json(Json& json, const ValidationConfig& options);
MUSTER_API void from_json(const Json& json, ValidationConfig& options);

}  // namespace muster
