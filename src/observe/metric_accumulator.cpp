#include "observe/metric_accumulator.hpp"

#include "base/json.hpp"
#include "muster/error.hpp"
#include "state/stateful.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace muster::detail::observe {
namespace {

double ratio(double part, double whole) { return whole > 0 ? part / whole : std::nan(""); }

/// Returns for each class: with `union_only`, the correct predictions over the union of predictions and targets (IoU);
/// else twice the correct predictions over the sum of both (F1).
std::vector<double> shares(std::span<const double> sums, bool union_only) {
  const auto classes = sums.size() / 3;
  std::vector<double> of_class(classes);
  for (std::size_t c = 0; c < classes; ++c) {
    const double right = sums[c], both = sums[classes + c] + sums[2 * classes + c];
    of_class[c] = union_only ? ratio(right, both - right) : ratio(2 * right, both);
  }
  return of_class;
}

/// Returns the mean over the classes that have a value, not NaN.
double mean_of(const std::vector<double>& values) {
  double sum = 0, count = 0;
  for (const double value : values)
    if (!std::isnan(value)) sum += value, ++count;
  return ratio(sum, count);
}

Json f1(const MetricAccumulator& accumulator) {
  const auto of_class = f1_by_class(accumulator.sums);
  const auto& average = accumulator.kind.at("average");
  if (average == "none") return of_class;
  if (average == "binary") return of_class.at(1);
  if (average == "macro") return mean_of(of_class);
  const auto right = accumulator.sums.begin(), predicted = right + static_cast<std::ptrdiff_t>(of_class.size());
  const auto present = predicted + static_cast<std::ptrdiff_t>(of_class.size());
  // Summed over all classes, precision, recall and so F1 are equal, since each sample has one prediction and one
  // target.
  return ratio(std::accumulate(right, predicted, 0.0), std::accumulate(predicted, present, 0.0));
}

Json confusion_matrix(const MetricAccumulator& accumulator) {
  const auto classes = accumulator.kind.at("num_classes").get<std::size_t>();
  auto rows = Json::array();
  for (std::size_t r = 0; r < classes; ++r) {
    auto row = Json::array();
    for (std::size_t c = 0; c < classes; ++c) {
      const double count = accumulator.sums[r * classes + c];
      const auto whole = static_cast<std::int64_t>(count);
      row.push_back(static_cast<double>(whole) == count ? Json(whole) : Json(count));
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

/// Returns the scores sorted, with the weights of equal scores added up. NaN comes last.
std::vector<ScoreWeights> sorted(std::span<const double> sums) {
  std::vector<ScoreWeights> all;
  for (std::size_t i = 0; i < sums.size(); i += per_score)
    all.push_back({sums[i], sums[i + 1], sums[i + 2], sums[i + 3]});
  std::ranges::sort(all, [](const ScoreWeights& a, const ScoreWeights& b) {
    if (std::isnan(a.score) || std::isnan(b.score)) return !std::isnan(a.score);
    return std::pair(a.score, a.rest) < std::pair(b.score, b.rest);
  });
  std::vector<ScoreWeights> once;
  for (const auto& one : all) {
    if (once.empty() || once.back().score != one.score || once.back().rest != one.rest) {
      once.push_back(one);
    } else {
      once.back().zeros += one.zeros;
      once.back().ones += one.ones;
    }
  }
  return once;
}

double area_under_curve(std::span<const double> sums) {
  double zeros = 0, ones = 0, pairs = 0;
  const auto all = sorted(sums);
  for (const auto& [score, rest, its_zeros, its_ones] : all) {
    pairs += its_ones * (zeros + its_zeros / 2);
    zeros += its_zeros;
    ones += its_ones;
  }
  return !all.empty() && std::isnan(all.back().score) ? std::nan("") : ratio(pairs, zeros * ones);
}

}  // namespace

Json to_json(const MetricAccumulator& accumulator) {
  auto sums = Json::array();
  for (const double sum : accumulator.sums) sums.push_back(state::value_to_json(sum));
  return {{"kind", accumulator.kind}, {"sums", std::move(sums)}};
}

bool from_json(const Json& json, MetricAccumulator& accumulator) {
  if (!json.is_object() || !json.contains("kind") || !json.contains("sums") || !json.at("sums").is_array())
    return false;
  accumulator = {.kind = json.at("kind")};
  return std::ranges::all_of(
      json.at("sums"), [&](const Json& sum) { return state::value_from_json(sum, accumulator.sums.emplace_back()); });
}

MetricAccumulator merged(const std::vector<MetricAccumulator>& accumulators) {
  MetricAccumulator all = accumulators.front();
  const bool lists = all.kind.at("metric") == "AUC";
  for (std::size_t r = 1; r < accumulators.size(); ++r) {
    const auto& [kind, sums] = accumulators[r];
    if (kind != all.kind || (!lists && sums.size() != all.sums.size()))
      throw Error(ExitCode::user_error, "merging the ranks' parts of a metric",
                  "it is " + json_text(all.kind) + " on one rank and " + json_text(kind) + " on another",
                  "Give the same metric with the same options on every rank");
    if (lists) {
      all.sums.insert(all.sums.end(), sums.begin(), sums.end());
      continue;
    }
    for (std::size_t i = 0; i < sums.size(); ++i) all.sums[i] += sums[i];
  }
  if (!lists) return all;
  const auto once = sorted(all.sums);
  all.sums.clear();
  for (const auto& [score, rest, zeros, ones] : once) all.sums.insert(all.sums.end(), {score, rest, zeros, ones});
  return all;
}

Json value_of(const MetricAccumulator& accumulator) {
  const auto& metric = accumulator.kind.at("metric");
  if (metric == "AUC") return area_under_curve(accumulator.sums);
  if (metric == "confusion matrix") return confusion_matrix(accumulator);
  if (metric == "F1") return f1(accumulator);
  if (metric == "mean IoU") return mean_of(iou_by_class(accumulator.sums));
  const double mean = ratio(accumulator.sums.at(0), accumulator.sums.at(1));
  return metric == "perplexity" ? std::exp(mean) : mean;
}

std::vector<double> samples_by_class(const MetricAccumulator& accumulator) {
  if (accumulator.kind.at("metric") != "confusion matrix") return {};
  const auto classes = accumulator.kind.at("num_classes").get<std::size_t>();
  std::vector<double> samples(classes);
  for (std::size_t i = 0; i < accumulator.sums.size(); ++i) samples[i / classes] += accumulator.sums[i];
  return samples;
}

std::vector<double> f1_by_class(std::span<const double> sums) { return shares(sums, false); }
std::vector<double> iou_by_class(std::span<const double> sums) { return shares(sums, true); }

}  // namespace muster::detail::observe
