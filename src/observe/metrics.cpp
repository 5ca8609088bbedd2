#include "observe/metrics.hpp"

#include "base/json.hpp"
#include "base/row_fields.hpp"
#include "muster/error.hpp"
#include "observe/metric_accumulator.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/item.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace muster {

Metric::Metric(const at::Tensor& value) {
  if (!value.defined() || value.numel() != 1 || value.is_complex()) {
    error_ = !value.defined()     ? "it is an undefined tensor"
             : value.numel() == 1 ? "it is a complex number"
                                  : c10::str("it is a tensor of the shape ", value.sizes());
    return;
  }
  const auto scalar = value.item();
  value_ = scalar.isBoolean()                         ? Json(scalar.toBool())
           : value.scalar_type() == at::kUInt64       ? Json(scalar.toUInt64())
           : scalar.isIntegral(/*includeBool=*/false) ? Json(scalar.toLong())
                                                      : Json(scalar.toDouble());
}

}  // namespace muster

namespace muster::detail::observe {
namespace {

Json finite(Json value) {
  if (value.is_array())
    for (auto& element : value) element = finite(std::move(element));
  return value.is_number_float() && !std::isfinite(value.get<double>()) ? Json(nullptr) : value;
}

[[noreturn]] void refuse_mix(const std::string& key, const std::string& fact) {
  throw Error(ExitCode::user_error, "reporting the metric \"" + key + "\"", fact,
              "Give the same metric under that name on every rank");
}

/// Merges the ranks' accumulators and returns the value of the metric.
Json value_of_accumulators(const std::string& key, const std::vector<Json>& values) {
  std::vector<MetricAccumulator> accumulators;
  for (const auto& value : values)
    if (value.size() < 3 || !from_json(value[2], accumulators.emplace_back()))
      refuse_mix(key, "it is a metric of samples on some ranks and a plain value on others");
  return finite(value_of(merged(accumulators)));
}

/// Returns the one value of a metric that mean_over_ranks() gives. `values`: [value, weight] or [value, weight,
/// accumulator] of each rank that has the metric; a negative weight means that none was given.
Json mean_of(const std::string& key, const std::vector<Json>& values) {
  if (std::ranges::any_of(values, [](const Json& v) { return v.size() == 3; }))
    return value_of_accumulators(key, values);
  const auto& first = values.front()[0];
  const auto numbers = std::ranges::count_if(values, [](const Json& v) { return v[0].is_number(); });
  const auto others = std::ranges::count_if(values, [](const Json& v) { return !v[0].is_number() && !v[0].is_null(); });
  if (numbers > 0 && others > 0) refuse_mix(key, "it is a number on some ranks and something else on others");
  if (numbers < std::ssize(values)) return finite(first);
  const bool equal = std::ranges::all_of(values, [&](const Json& v) { return v[0] == first; });
  if (equal && first.is_number_integer()) return first;
  double sum = 0, weights = 0;
  for (const auto& one : values) {
    const auto weight = one[1].get<std::int64_t>();
    const double counts = weight < 0 ? 1.0 : static_cast<double>(weight);
    if (counts == 0) continue;  // leave out a mean over no samples, which is NaN
    sum += one[0].get<double>() * counts;
    weights += counts;
  }
  if (weights == 0) return nullptr;
  // Equal values stay as they are: (0.2 + 0.2 + 0.2) / 3 is not 0.2.
  return finite(equal ? first : Json(sum / weights));
}

}  // namespace

void require_value(const std::string& name, const Metric& metric) {
  if (!metric.error().empty())
    throw Error(ExitCode::user_error, "reporting the metric \"" + name + "\"", metric.error(),
                "Give one real number, as values.mean(), or a list as Json");
}

Json to_json(const Metrics& metrics) {
  Json all = Json::object();
  for (const auto& [key, metric] : metrics) {
    if (is_reserved(key))
      throw Error(ExitCode::user_error, "reporting metrics", "\"" + key + "\" is a field that every report already has",
                  "Choose another name");
    require_value(key, metric);
    require_json_readable(metric.value(), "reporting the metric \"" + key + "\"");
    auto& values = all[key] = Json::array({metric.value(), metric.weight()});
    if (!metric.accumulator().is_null()) values.push_back(metric.accumulator());
  }
  return all;
}

Json mean_over_ranks(const std::vector<Json>& ranks) {
  std::map<std::string, std::vector<Json>> values;
  for (const auto& rank : ranks)
    for (const auto& [key, value] : rank.items()) values[key].push_back(value);
  Json row = Json::object();
  for (const auto& [key, of_ranks] : values) row[key] = mean_of(key, of_ranks);
  return row;
}

Json list_over_ranks(const std::vector<Json>& ranks) {
  Json row = Json::object();
  for (std::size_t r = 0; r < ranks.size(); ++r)
    for (const auto& [key, value] : ranks[r].items()) {
      auto& list = row[key];
      if (list.is_null()) list = Json(ranks.size(), nullptr);
      list[r] = finite(value[0]);
    }
  return row;
}

std::string matrix_counted_by_all_ranks(const std::vector<Json>& ranks) {
  if (ranks.size() < 2) return {};
  for (const auto& [key, value] : ranks.front().items()) {
    if (value.size() < 3 || value[2].at("kind").at("metric") != "confusion matrix") continue;
    std::vector<double> first;
    const bool equal = std::ranges::all_of(ranks, [&, &key = key](const Json& rank) {
      MetricAccumulator accumulator;
      if (!rank.contains(key) || rank.at(key).size() < 3 || !from_json(rank.at(key)[2], accumulator)) return false;
      const auto counts = samples_by_class(accumulator);
      if (first.empty()) first = counts;
      return counts == first;
    });
    if (equal && std::ranges::any_of(first, [](double count) { return count != 0; })) return key;
  }
  return {};
}

}  // namespace muster::detail::observe
