// Callbacks that are ready: early stopping, learning rates, a budget of time.
//
//   muster::TorchTrainer(launch, train, {.run_config = {.callbacks = {
//       muster::early_stopping({.metric = "val_loss", .patience = 5}), muster::time_budget(std::chrono::hours(8))}}});
//
// Two refer to objects of the training function, which gives them to the session itself:
//
//   session.add_callback(muster::learning_rate_monitor(optimizer));
//   session.add_callback(muster::plateau(scheduler, {.metric = "val_loss"}));
//
// A report that lacks the metric, as one in the middle of an epoch may, does not count.
#pragma once

#include <muster/callback.hpp>
#include <muster/config.hpp>
#include <muster/json.hpp>

#include <chrono>
#include <memory>
#include <string>

namespace torch::optim {
class Optimizer;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

namespace muster {

struct EarlyStoppingOptions {
  /// A reported number. NaN is no better than anything.
  std::string metric = {};
  /// Which is the better one.
  ScoreOrder mode = ScoreOrder::min;
  /// Reports, one after the other, that may be no better than the best before training ends.
  int patience = 3;
  /// How much better is better.
  double min_delta = 0;
};
void to_json(Json& json, const EarlyStoppingOptions& options);
void from_json(const Json& json, EarlyStoppingOptions& options);

/// Ends training, as done, where a metric does not get better. A run that is taken up again goes on counting; with
/// another metric or mode it begins anew, with a warning. One that has ended so is finished, and trains no more unless
/// it is started with another train_loop_config or --resume must; then it goes on where there is more patience.
std::shared_ptr<Callback> early_stopping(const EarlyStoppingOptions& options);

struct PlateauOptions {
  /// A reported number.
  std::string metric = {};
};
void to_json(Json& json, const PlateauOptions& options);
void from_json(const Json& json, PlateauOptions& options);

/// Steps the scheduler by each report's metric, before its checkpoint is made: put the scheduler into the state. Where
/// a run goes on with another metric, or the scheduler with another mode, the best value begins anew, with a warning;
/// the learning rate stays.
std::shared_ptr<Callback> plateau(torch::optim::ReduceLROnPlateauScheduler& scheduler, const PlateauOptions& options);

struct LearningRateMonitorOptions {
  /// Of the metric; where there are several groups of parameters theirs are lr_0, lr_1, …
  std::string name = "lr";
};
void to_json(Json& json, const LearningRateMonitorOptions& options);
void from_json(const Json& json, LearningRateMonitorOptions& options);

/// The learning rate in each report's row.
std::shared_ptr<Callback> learning_rate_monitor(const torch::optim::Optimizer& optimizer,
                                                const LearningRateMonitorOptions& options = {});

/// Ends training, as done, with the first report whose time_total_s, in which earlier jobs count, has come to that.
std::shared_ptr<Callback> time_budget(std::chrono::duration<double> time);

}  // namespace muster
