// The step of a prepared optimizer: fused where that is possible and gains, else its own.
#pragma once

#include "muster/optimizer.hpp"
#include "optim/number_watch.hpp"

#include <memory>
#include <vector>

namespace muster::detail::gradients {
class DataParallel;
}

namespace muster::detail::optim {

/// `models`: those that are prepared; the optimizer's parameters may be those of one of them. `numbers`: what is wanted
/// about NaN and infinite numbers, where it is the optimizer `number`; nothing if null. Collective.
std::unique_ptr<OptimizerStep> make_optimizer_step(torch::optim::Optimizer& optimizer,
                                                   const std::vector<std::shared_ptr<gradients::DataParallel>>& models,
                                                   const OptimizerOptions& options,
                                                   std::shared_ptr<NumberWatch> numbers = nullptr, int number = 0);

}  // namespace muster::detail::optim
