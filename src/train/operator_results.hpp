// What the workers' calls give becomes one result: pure functions.
#pragma once

#include "muster/metrics.hpp"

#include <vector>

namespace muster::detail::train {

/// A worker's metrics with their weights, in units of samples (what has none weighs the worker's num_samples, or 1),
/// and what they are made of.
Json with_weights(const Metrics& metrics);
/// One value per key: num_samples is summed, batch_count the plain mean, what is made of tallies is made of all of
/// them, other numbers the mean by weight, what is no number that of the first worker.
Json reduced(const std::vector<Json>& of_workers);
/// Each worker's values.
Json listed(const std::vector<Json>& of_workers);

}  // namespace muster::detail::train
