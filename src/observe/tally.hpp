// What the metrics of classification.hpp count, and what becomes of it: pure functions.
#pragma once

#include "muster/json.hpp"

#include <span>
#include <vector>

namespace muster::detail::observe {

/// A rank's share of a metric.
struct Tally {
  Json kind = {};                 ///< {"metric": "F1", …options}
  std::vector<double> sums = {};  ///< what is added up over samples; of the AUC a list of Scored
};

/// Of one score: what the samples of class 0 and of class 1 weigh that have it.
struct Scored {
  double score, zeros, ones;
};

Json to_json(const Tally& tally);
/// False if it is something else.
bool from_json(const Json& json, Tally& tally);

/// Those of ranks, as if one had seen all samples. An Error (ExitCode::user_error) for different kinds.
Tally merged(const std::vector<Tally>& tallies);

/// A number, or a list; NaN where it is undefined.
Json value_of(const Tally& tally);

/// Of a confusion matrix the samples of each class; empty for any other metric.
std::vector<double> samples_by_class(const Tally& tally);

/// By class, from the sums of F1 and MeanIoU: of each class what is predicted rightly, what is predicted, what there
/// is.
std::vector<double> f1_by_class(std::span<const double> sums);
std::vector<double> iou_by_class(std::span<const double> sums);

}  // namespace muster::detail::observe
