// Combines the workers' results of a call into one. Pure functions.
#pragma once

#include "muster/metrics.hpp"

#include <vector>

namespace muster::detail::operators {

/// A worker's metrics as {name: [value, weight, accumulator]}; the accumulator only if the metric has one. Weights are
/// in samples; a metric without a weight gets the worker's num_samples, or 1.
Json to_weighted_json(const Metrics& metrics);
/// One value per name: num_samples is the sum; batch_count the plain mean; a metric with accumulators is computed from
/// all workers' accumulators; other numbers are the weighted mean; anything else is the first worker's value.
Json reduce_over_workers(const std::vector<Json>& of_workers);
/// A list of each worker's values.
Json list_over_workers(const std::vector<Json>& of_workers);

}  // namespace muster::detail::operators
