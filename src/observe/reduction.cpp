#include "observe/reduction.hpp"

#include "muster/error.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/item.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string_view>

namespace muster {

void Mean::add(const at::Tensor& value, std::int64_t samples) {
  if (samples > 0) add(value.item().toDouble(), samples);
}

Metric::Metric(const at::Tensor& value) {
  const auto scalar = value.item();
  if (scalar.isIntegral(/*includeBool=*/false))
    value_ = scalar.toLong();
  else if (scalar.isBoolean())
    value_ = scalar.toBool();
  else
    value_ = scalar.toDouble();
}

}  // namespace muster

namespace muster::detail::observe {
namespace {

constexpr std::array<std::string_view, 9> reserved{"training_iteration", "global_step",  "timestamp",
                                                   "time_this_iter_s",   "time_total_s", "num_samples",
                                                   "samples_per_s",      "world_size",   "checkpoint_dir_name"};

Json finite(Json value) {
  return value.is_number_float() && !std::isfinite(value.get<double>()) ? Json(nullptr) : value;
}

/// `given`: [value, weight] of each rank that gave the key.
Json reduce_values(const std::vector<Json>& given) {
  const auto& first = given.front()[0];
  const bool numbers = std::all_of(given.begin(), given.end(), [](const Json& g) { return g[0].is_number(); });
  if (!numbers) return first;
  const bool equal_integers =
      std::all_of(given.begin(), given.end(), [&](const Json& g) { return g[0].is_number_integer() && g[0] == first; });
  if (equal_integers) return first;
  double sum = 0, weights = 0;
  for (const auto& one : given) {
    const auto weight = one[1].get<std::int64_t>();
    const double counts = weight < 0 ? 1.0 : static_cast<double>(weight);
    if (counts == 0) continue;  // a mean over nothing is NaN and says nothing
    sum += one[0].get<double>() * counts;
    weights += counts;
  }
  return weights > 0 ? finite(sum / weights) : Json(nullptr);
}

}  // namespace

Json encode(const Metrics& metrics) {
  Json encoded = Json::object();
  for (const auto& [key, metric] : metrics) {
    if (std::find(reserved.begin(), reserved.end(), key) != reserved.end())
      throw Error(ExitCode::user_error, "reporting metrics", "\"" + key + "\" is a name that every report has already",
                  "Choose another name");
    encoded[key] = Json::array({metric.value(), metric.weight()});
  }
  return encoded;
}

Json reduce(const std::vector<Json>& ranks, bool reduce) {
  std::set<std::string> keys;
  for (const auto& rank : ranks)
    for (const auto& [key, value] : rank.items()) keys.insert(key);
  Json row = Json::object();
  for (const auto& key : keys) {
    std::vector<Json> given;
    for (const auto& rank : ranks)
      if (rank.contains(key)) given.push_back(rank.at(key));
    if (reduce) {
      row[key] = finite(reduce_values(given));
    } else {
      row[key] = Json::array();
      for (auto& one : given) row[key].push_back(finite(one[0]));
    }
  }
  return row;
}

}  // namespace muster::detail::observe
