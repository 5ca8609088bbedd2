// The step of a prepared optimizer: fused with the averaging of gradients if that is possible and faster, else the
// optimizer's own step.
#pragma once

#include "muster/communicator.hpp"
#include "muster/optimizer.hpp"
#include "optim/bad_number_policy.hpp"
#include "optim/memory_snapshot.hpp"

#include <memory>
#include <vector>

namespace muster::detail::gradients {
class PreparedModel;
}

namespace muster::detail::optim {

/// Carries out the functions of a prepared optimizer (PreparedOptimizer) that muster replaces or adds.
class OptimizerStep {
 public:
  using Closure = std::function<at::Tensor()>;

  virtual ~OptimizerStep() = default;
  /// Averages gradients if needed, and steps. `plain`: the optimizer's own step(). Collective.
  virtual at::Tensor step(torch::optim::Optimizer& optimizer, const Closure& closure,
                          const std::function<at::Tensor(Closure)>& plain) = 0;
  /// Makes .grad hold the averages. Collective.
  virtual void average_gradients(torch::optim::Optimizer& optimizer) = 0;
  /// Makes the optimizer's whole state readable on this rank, until the next step. Collective.
  virtual void gather_state() = 0;
  virtual double grad_norm() const noexcept = 0;
  virtual bool fused() const noexcept = 0;
  virtual std::int64_t skipped_steps() const noexcept = 0;
};

/// For each optimizer of a session, in the order of prepare_optimizer(): the number of its steps, and then the learning
/// rates of its parameter groups in the last step. Empty for an optimizer that is gone, has not stepped, steps no
/// averaged gradients, or has options without a learning rate.
using LastRates = std::vector<std::vector<double>>;

/// Data that the optimizers of a session share; empty without a session.
struct SharedOptimizerData {
  /// What to do about NaN and infinite numbers; null to ignore them.
  std::shared_ptr<BadNumberPolicy> numbers = nullptr;
  int optimizer_number = 0;  ///< the optimizer's number in `numbers`
  std::shared_ptr<SnapshotSources> snapshot_sources =
      nullptr;  ///< the optimizer adds itself, so that saves in the background can use its snapshots
  std::shared_ptr<LastRates> last_rates = nullptr;  ///< the optimizer adds a list and updates it
};

/// Throws an Error (ExitCode::usage), the same on all ranks, if the ranks give different options. Collective.
void require_same_options(const Communicator& communicator, const OptimizerOptions& options);

/// `models`: the prepared models. The optimizer may step parameters of one of them. Collective.
std::unique_ptr<OptimizerStep> make_optimizer_step(torch::optim::Optimizer& optimizer,
                                                   const std::vector<std::shared_ptr<gradients::PreparedModel>>& models,
                                                   const OptimizerOptions& options,
                                                   const SharedOptimizerData& shared = {});

}  // namespace muster::detail::optim
