// The step of a prepared optimizer: fused where that is possible and gains, else its own.
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

/// What an optimizer has in common with the others of its session; nothing where there is none.
struct SessionWide {
  std::shared_ptr<NumberWatch> numbers = nullptr;    ///< what is wanted about NaN and infinite numbers
  int number = 0;                                    ///< the optimizer's, there
  std::shared_ptr<Freezables> freezables = nullptr;  ///< among which it enters itself, to be saved behind training
};

/// `models`: those that are prepared; the optimizer's parameters may be those of one of them. Collective.
std::unique_ptr<OptimizerStep> make_optimizer_step(torch::optim::Optimizer& optimizer,
                                                   const std::vector<std::shared_ptr<gradients::DataParallel>>& models,
                                                   const OptimizerOptions& options, const SessionWide& wide = {});

}  // namespace muster::detail::optim
