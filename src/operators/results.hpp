// Combines the workers' results of a call into one result. All functions are pure.
#pragma once

#include "muster/metrics.hpp"

#include <vector>

namespace muster::detail::operators {

/// Returns a worker's metrics as {name: [value, weight, accumulator]}; the accumulator is only there if the metric has
/// one. Weights are numbers of samples; a metric without a weight gets the worker's num_samples, or 1. batch_count gets
/// the weight 1.
Json to_weighted_json(const Metrics& metrics);
/// Returns one value per name: for num_samples the sum; for batch_count the plain mean; for a metric with accumulators
/// its value over all workers; for other numbers the weighted mean; for anything else the first worker's value.
Json reduce_over_workers(const std::vector<Json>& of_workers);
/// Returns a list of the workers' values: for each worker an object of names and values. NaN and infinity become null.
Json list_over_workers(const std::vector<Json>& of_workers);

}  // namespace muster::detail::operators
