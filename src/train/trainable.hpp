// What as_trainable() of a trainer gives a sweep.
#pragma once

#include "muster/trainer.hpp"

#include <functional>

namespace muster::detail::train {

/// A Trainable that can be asked for the settings with which every trial begins, before those of the trial.
struct TrainerTrial {
  std::function<Result(Launch& launch, const Config& config)> fit;
  std::function<Config()> defaults;

  Result operator()(Launch& launch, const Config& config) const { return fit(launch, config); }
};

}  // namespace muster::detail::train
