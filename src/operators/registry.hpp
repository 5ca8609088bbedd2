// What an operator on one worker has registered: models, optimizers, schedulers, data, criterion.
#pragma once

#include "muster/operator.hpp"
#include "operators/batches.hpp"
#include "session/session_state.hpp"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::operators {

/// What an operator has registered, and what else the calls of its trainer need. There is one on each worker.
struct OperatorRegistry {
  OperatorRegistry(session::SessionState& state, Session& session, const OperatorTrainerOptions& options,
                   Config config);

  session::SessionState& state;
  Session& session;
  const OperatorTrainerOptions options;
  const Config config;
  const std::unique_ptr<GradScaler> scaler;

  int data_registration_count = 0;  ///< number of register_data() calls
  std::vector<std::shared_ptr<torch::nn::Module>> models;
  std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers;
  std::vector<std::shared_ptr<torch::optim::LRScheduler>> schedulers;
  std::vector<std::shared_ptr<torch::optim::ReduceLROnPlateauScheduler>> plateaus;
  Forward forward;
  Criterion criterion;
  bool elementwise = false;    ///< true if the criterion needs output and target of the same shape
  std::string logged_columns;  ///< the last log line about features and target; an equal line is not logged again
  TrainBatches train;
  ValidationBatches validation;

  /// Gives the operator its registry, before setup().
  static void attach(TrainingOperator& to, std::unique_ptr<OperatorRegistry> registry) {
    to.registry_ = std::move(registry);
  }
  static OperatorRegistry& of(TrainingOperator& owner) { return owner.registry(); }
  /// Returns the entries of trainer.state_dict().
  StateEntries state_entries(TrainingOperator& owner);
};

}  // namespace muster::detail::operators
