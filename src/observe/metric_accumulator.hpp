// The sums that the metrics of classification.hpp count, and the values computed from them. All functions are pure.
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
  std::vector<double> sums = {};  ///< sums over samples; for the AUC a list of ScoreWeights, `per_score` numbers each
};

/// A score, and for each of the classes 0 and 1 the sum of the weights of the samples with this score. If the score is
/// a whole number that a double cannot hold, `rest` is the difference.
struct ScoreWeights {
  double score, rest, zeros, ones;
};
/// How many numbers of MetricAccumulator::sums make up one ScoreWeights.
inline constexpr std::size_t per_score = 4;

MUSTER_INTERNAL_API Json to_json(const MetricAccumulator& accumulator);
/// Reads `json` into `accumulator`. Returns false if it is not a MetricAccumulator.
MUSTER_INTERNAL_API bool from_json(const Json& json, MetricAccumulator& accumulator);

/// Adds up the parts of all ranks, as if one rank had counted all samples. Throws an Error (ExitCode::user_error) if
/// their kinds differ.
MUSTER_INTERNAL_API MetricAccumulator merged(const std::vector<MetricAccumulator>& accumulators);

/// Returns the metric's value: a number or a list; NaN if it is undefined.
MUSTER_INTERNAL_API Json value_of(const MetricAccumulator& accumulator);

/// Returns the number of samples of each class, by their targets, in a confusion matrix; empty for other metrics.
std::vector<double> samples_by_class(const MetricAccumulator& accumulator);

/// Return the metric of each class. `sums`: of F1 or MeanIoU, three lists with a number for each class: samples
/// predicted correctly, samples predicted, samples with this target.
std::vector<double> f1_by_class(std::span<const double> sums);
std::vector<double> iou_by_class(std::span<const double> sums);

}  // namespace muster::detail::observe
