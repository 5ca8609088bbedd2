// The sums that the metrics of classification.hpp count, and the metrics' values: pure functions.
#pragma once

#include "base/export.hpp"
#include "muster/json.hpp"

#include <cstddef>
#include <span>
#include <vector>

namespace muster::detail::observe {

/// One rank's part of a metric.
struct MetricAccumulator {
  Json kind = {};                 ///< {"metric": "F1", …options}
  std::vector<double> sums = {};  ///< sums over samples; for the AUC a list of ScoreWeights
};

/// A score, and the sums of the weights of the samples with that score, of class 0 and of class 1. `rest` is what a
/// double cannot hold of a whole number.
struct ScoreWeights {
  double score, rest, zeros, ones;
};
/// Numbers in a ScoreWeights.
inline constexpr std::size_t per_score = 4;

MUSTER_INTERNAL_API Json to_json(const MetricAccumulator& accumulator);
/// Reads `json` into `accumulator`. Returns false if it is not a MetricAccumulator.
MUSTER_INTERNAL_API bool from_json(const Json& json, MetricAccumulator& accumulator);

/// Adds up the parts of all ranks, as if one rank had seen all samples. Throws an Error (ExitCode::user_error) if their
/// kinds differ.
MUSTER_INTERNAL_API MetricAccumulator merged(const std::vector<MetricAccumulator>& accumulators);

/// The metric's value: a number or a list. NaN if it is undefined.
MUSTER_INTERNAL_API Json value_of(const MetricAccumulator& accumulator);

/// The number of samples of each class in a confusion matrix; empty for any other metric.
std::vector<double> samples_by_class(const MetricAccumulator& accumulator);

/// The metric of each class. `sums` are those of F1 and MeanIoU, three for each class: samples predicted correctly,
/// samples predicted, samples with that target.
std::vector<double> f1_by_class(std::span<const double> sums);
std::vector<double> iou_by_class(std::span<const double> sums);

}  // namespace muster::detail::observe
