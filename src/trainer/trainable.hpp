// The function object in the Trainable that a trainer's as_trainable() returns. Sweeps recognise it by its type.
#pragma once

#include "muster/trainer.hpp"

#include <functional>

namespace muster::detail::trainer {

/// A Trainable that also has default settings; the settings of each trial replace some of them.
struct TrainerTrainable {
  std::function<Result(Launch& launch, const Config& config)> fit;
  std::function<Config()> default_config;

  Result operator()(Launch& launch, const Config& config) const { return fit(launch, config); }
};

}  // namespace muster::detail::trainer
