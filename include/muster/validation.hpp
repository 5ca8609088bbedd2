// Validation beside training: a function that measures a checkpoint while the workers go on.
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
//   // Of mpirun -n 8 two ranks validate.
//   muster::TorchTrainer trainer(launch, train, {.scaling_config = {.num_workers = 6},
//                                                .validation = {.function = validate, .timeout = 10min}});
//   session.report(metrics, state, {.validation = true});        // in train
//
// Ranks that do not train validate, over a communicator of their own: one checkpoint after the other, the oldest first,
// each as soon as it is committed, while no worker waits. When training has ended they finish what they have begun, and
// all ranks together do the rest; where every rank trains, that is all of it. A run that is asked to stop begins only
// what ends before its time is over, as far as that is known; what is left is pending, and validated when the run is
// started again, also if it was finished. So is what a lost job had begun.
//
// What the function gives is reduced over the ranks as Session::report() reduces it, written to validation.json in the
// checkpoint's folder, and put into the row of its report: a metric of the same name as one that was reported takes its
// place. CheckpointConfig::checkpoint_score_attribute may name it, and a checkpoint whose validation is pending is not
// pruned. The row's "checkpoint_status" says how it stands. A function that throws, or takes longer than `timeout`, is
// a warning: the metrics that earlier validations had are null.
#pragma once

#include <muster/checkpoint.hpp>
#include <muster/config.hpp>
#include <muster/json.hpp>
#include <muster/metrics.hpp>

#include <chrono>
#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>

namespace muster {

class Session;

/// Called on every rank that validates, on a thread of its own where MPI may be called by several: any callable
/// Metrics(Session&, const Checkpoint&), or one that gives a Config.
///
/// The session's ranks are those that validate, and every dataset is split among them: a Mean is weighted by its
/// samples, other numbers count alike. No gradients are recorded. The session is for evaluation alone: what reports,
/// restores, stops or counts epochs is an Error (ExitCode::usage).
class ValidationFunction {
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
  /// How long one may take; then it is given up, and its ranks validate nothing more in this job. A function that does
  /// not end then is left behind on its thread: when main returns there, the process ends without the destructors of
  /// static objects. Where MPI may be called by one thread alone, a validation takes as long as it takes.
  std::chrono::milliseconds timeout = std::chrono::hours(1);
};
void to_json(Json& json, const ValidationConfig& options);
void from_json(const Json& json, ValidationConfig& options);

}  // namespace muster
