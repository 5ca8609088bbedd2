// Callbacks that are ready to use: early stopping, learning rates, a time budget.
//
//   muster::TorchTrainer(launch, train, {.run_config = {.callbacks = {
//       muster::early_stopping({.metric = "val_loss", .mode = muster::ScoreOrder::min, .patience = 5}),
//       muster::time_budget(std::chrono::hours(8))}}});
//
// Two of them refer to objects of the training function, which adds them to the session itself:
//
//   session.add_callback(muster::learning_rate_monitor(optimizer));
//   session.add_callback(muster::plateau(scheduler, {.metric = "val_loss"}));
//
// For early_stopping() and plateau(), a report that lacks the metric, such as one in the middle of an epoch, does not
// count.
#pragma once

#include <muster/callback.hpp>
#include <muster/config.hpp>
#include <muster/detail/export.hpp>
#include <muster/json.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

namespace torch::optim {
class Optimizer;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

namespace muster {

struct EarlyStoppingOptions {
  /// The name of a number that reports give, or the validations of their checkpoints. NaN is never better.
  std::string metric = {};
  /// Whether a larger or a smaller value is better. Required.
  std::optional<ScoreOrder> mode = {};
  /// Training ends after this many reports in a row that are no better than the best one; 0 counts as 1.
  int patience = 3;
  /// A value counts as better only if it is better than the best one by more than this.
  double min_delta = 0;
};

/// Ends training, as finished, when a metric no longer improves. A run that is continued keeps its count; with another
/// metric or mode it begins anew, with a warning. A run that has ended this way is finished. Another start trains only
/// with another train_loop_config or --resume must, and then ends at once unless `patience` is larger than before.
MUSTER_API std::shared_ptr<Callback> early_stopping(const EarlyStoppingOptions& options);

struct PlateauOptions {
  /// The name of a number that reports give. Metrics that a validation gives later do not count.
  std::string metric = {};
};

/// Steps the scheduler with each report's metric, before the report's checkpoint is made: put the scheduler and its
/// optimizer into the state. If the report fails, both get their earlier values back. If a run continues with another
/// metric, or the scheduler with another mode, the best value begins anew, with a warning; the learning rate stays.
MUSTER_API std::shared_ptr<Callback> plateau(torch::optim::ReduceLROnPlateauScheduler& scheduler,
                                             const PlateauOptions& options);

struct LearningRateMonitorOptions {
  /// The metric's name; with several parameter groups: lr_0, lr_1, …
  std::string name = "lr";
};

/// Adds the optimizer's present learning rate to each report's row, unless the report has a metric of that name.
MUSTER_API std::shared_ptr<Callback> learning_rate_monitor(const torch::optim::Optimizer& optimizer,
                                                           const LearningRateMonitorOptions& options = {});

/// Ends training, as finished, at the first report whose time_total_s, earlier jobs included, has reached `time`.
MUSTER_API std::shared_ptr<Callback> time_budget(std::chrono::milliseconds time);

}  // namespace muster
