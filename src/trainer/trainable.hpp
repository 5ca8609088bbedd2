// The return type of a trainer's as_trainable(), for sweeps.
#pragma once

#include "muster/trainer.hpp"

#include <functional>

namespace muster::detail::trainer {

/// A Trainable that also has the default settings, over which each trial lays its own.
struct TrainerTrainable {
  std::function<Result(Launch& launch, const Config& config)> fit;
  std::function<Config()> default_config;

  Result operator()(Launch& launch, const Config& config) const { return fit(launch, config); }
};

}  // namespace muster::detail::trainer
