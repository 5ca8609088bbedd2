// The step of a prepared optimizer: fused with the averaging if that is possible and faster, else the optimizer's own.
#pragma once

#include "muster/optimizer.hpp"
#include "optim/frozen.hpp"
#include "optim/number_watch.hpp"

#include <memory>
#include <vector>

namespace muster::detail::gradients {
class DataParallel;
}

namespace muster::detail::optim {

/// Data that the optimizers of a session share; empty without a session.
struct SessionWide {
  std::shared_ptr<NumberWatch> numbers = nullptr;    ///< what to do about NaN and infinite numbers; null for nothing
  int number = 0;                                    ///< the optimizer's number in `numbers`
  std::shared_ptr<Freezables> freezables = nullptr;  ///< the optimizer adds itself, to be saved in the background
};

/// `models`: the prepared models; the optimizer may step parameters of one of them. Collective.
std::unique_ptr<OptimizerStep> make_optimizer_step(torch::optim::Optimizer& optimizer,
                                                   const std::vector<std::shared_ptr<gradients::DataParallel>>& models,
                                                   const OptimizerOptions& options, const SessionWide& wide = {});

}  // namespace muster::detail::optim
