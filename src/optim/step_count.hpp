// Access to the step count of libtorch's schedulers, which only a derived class may read.
#pragma once

#include <torch/optim/schedulers/lr_scheduler.h>

namespace muster::detail::optim {

struct StepCount : torch::optim::LRScheduler {
  static constexpr unsigned torch::optim::LRScheduler::*of = &StepCount::step_count_;
};

}  // namespace muster::detail::optim
