// What an operator has registered, on one worker: models, optimizers, schedulers, data, criterion.
#pragma once

#include "muster/operator.hpp"
#include "operators/batches.hpp"
#include "session/session_state.hpp"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::operators {

/// A member for each thing that may be registered, and what the calls of the operator need with it.
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
  bool elementwise = false;    ///< the criterion needs output and target of the same shape
  std::string logged_columns;  ///< the last log line about features and target, so that it is not repeated
  TrainBatches train;
  ValidationBatches validation;

  /// Gives the operator its parts, before setup().
  static void attach(TrainingOperator& to, std::unique_ptr<OperatorRegistry> parts) { to.parts_ = std::move(parts); }
  static OperatorRegistry& of(TrainingOperator& its) { return its.parts(); }
  /// The entries of trainer.state_dict().
  StateEntries state_entries(TrainingOperator& its);
};

}  // namespace muster::detail::operators
