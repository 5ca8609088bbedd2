// Combines the metrics that the ranks report into one row. All functions are pure.
#pragma once

#include "base/export.hpp"
#include "muster/metrics.hpp"

#include <string>
#include <vector>

namespace muster::detail::observe {

/// Returns a rank's metrics as JSON, with their weights and accumulators. Throws an Error (ExitCode::user_error) if a
/// metric has a reserved name, has no single value, or cannot be JSON.
Json to_json(const Metrics& metrics);
/// Throws an Error that names the metric if it has no single value, for example if it is a tensor of several numbers.
MUSTER_INTERNAL_API void require_value(const std::string& name, const Metric& metric);

/// Merges the ranks' metrics, as returned by to_json(). Each key gets one value, from the ranks that have the key:
/// - equal numbers stay as they are,
/// - other numbers become their mean, weighted by samples (by 1 if a rank gave no number of samples); null if all
///   weights are 0,
/// - metrics with accumulators are computed from all ranks' accumulators together,
/// - anything else is taken from the lowest rank.
/// NaN and infinity become null. Throws an Error if a metric is a number on some ranks and something other than null on
/// others.
MUSTER_INTERNAL_API Json mean_over_ranks(const std::vector<Json>& ranks);
/// Returns for each key the list of the ranks' values; null for a rank that does not have the key.
Json list_over_ranks(const std::vector<Json>& ranks);

/// Returns the name of the first confusion matrix in which all ranks have counted equally many samples of each class:
/// probably each rank has counted the same samples. Empty if there is no such matrix, or only one rank.
std::string matrix_counted_by_all_ranks(const std::vector<Json>& ranks);

}  // namespace muster::detail::observe
