// The step of a prepared optimizer: fused with the averaging if that is possible and faster, else the optimizer's own.
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

/// Implements the step of a prepared optimizer.
class OptimizerStep {
 public:
  using Closure = std::function<at::Tensor()>;

  virtual ~OptimizerStep() = default;
  /// `plain` is the optimizer's own step. Collective.
  virtual at::Tensor step(torch::optim::Optimizer& optimizer, const Closure& closure,
                          const std::function<at::Tensor(Closure)>& plain) = 0;
  /// Collective.
  virtual void average_gradients(torch::optim::Optimizer& optimizer) = 0;
  virtual double grad_norm() const noexcept = 0;
  virtual bool fused() const noexcept = 0;
  virtual std::int64_t skipped_steps() const noexcept = 0;
};

/// Of each optimizer of a session, in the order of prepare_optimizer(): the number of its steps, and the learning rates
/// of its parameter groups in the last one. Empty for one that is gone, has not stepped, or steps no averaged
/// gradients.
using LastRates = std::vector<std::vector<double>>;

/// Data that the optimizers of a session share; empty without a session.
struct SharedOptimizerData {
  std::shared_ptr<BadNumberPolicy> numbers = nullptr;  ///< what to do about NaN and infinite numbers; null for nothing
  int optimizer_number = 0;                            ///< the optimizer's number in `numbers`
  std::shared_ptr<SnapshotSources> snapshot_sources =
      nullptr;                                      ///< the optimizer adds itself, to be saved in the background
  std::shared_ptr<LastRates> last_rates = nullptr;  ///< the optimizer adds and keeps its own
};

/// Throws an Error (ExitCode::usage), the same on all ranks, if they give different options. Collective.
void require_same_options(const Communicator& communicator, const OptimizerOptions& options);

/// `models`: the prepared models; the optimizer may step parameters of one of them. Collective.
std::unique_ptr<OptimizerStep> make_optimizer_step(torch::optim::Optimizer& optimizer,
                                                   const std::vector<std::shared_ptr<gradients::PreparedModel>>& models,
                                                   const OptimizerOptions& options,
                                                   const SharedOptimizerData& shared = {});

}  // namespace muster::detail::optim
