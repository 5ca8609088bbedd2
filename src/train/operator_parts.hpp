// What an operator has registered, on one worker: models, optimizers, schedulers, data, criterion.
#pragma once

#include "muster/operator.hpp"
#include "train/operator_batches.hpp"
#include "train/session_state.hpp"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::train {

struct OperatorParts {
  OperatorParts(SessionState& state, Session& session, const OperatorTrainerOptions& options, Config config);

  SessionState& state;
  Session& session;
  const OperatorTrainerOptions& options;
  const Config config;
  const bool fp16;
  const std::unique_ptr<GradScaler> scaler;

  int registrations = 0;  ///< number of register_data() calls
  std::vector<std::shared_ptr<torch::nn::Module>> models;
  std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers;
  std::vector<std::shared_ptr<torch::optim::LRScheduler>> schedulers;
  std::vector<std::shared_ptr<torch::optim::ReduceLROnPlateauScheduler>> plateaus;
  Forward forward;
  Criterion criterion;
  bool elementwise = false;  ///< the criterion needs output and target of the same shape
  std::string told_columns;  ///< the last log line about features and target
  TrainFeed train;
  ValidationFeed validation;

  /// Gives the operator its parts, before setup().
  static void attach(TrainingOperator& to, std::unique_ptr<OperatorParts> parts) { to.parts_ = std::move(parts); }
  static OperatorParts& of(TrainingOperator& its) { return its.parts(); }
  /// The entries of trainer.state_dict().
  StateEntries entries(TrainingOperator& its);
};

}  // namespace muster::detail::train
