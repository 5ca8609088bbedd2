// How many steps one of libtorch's schedulers has made, which only a class derived from it may ask.
#pragma once

#include <torch/optim/schedulers/lr_scheduler.h>

namespace muster::detail::optim {

struct StepCount : torch::optim::LRScheduler {
  static constexpr unsigned torch::optim::LRScheduler::*of = &StepCount::step_count_;
};

}  // namespace muster::detail::optim
