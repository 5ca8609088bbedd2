#include "operators/results.hpp"

#include "muster/error.hpp"
#include "muster/operator.hpp"
#include "observe/metric_accumulator.hpp"
#include "observe/metrics.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace muster {
namespace {

constexpr const char* num_samples = "num_samples";
constexpr const char* batch_count = "batch_count";
constexpr std::string_view last_prefix = "last_";

std::optional<std::int64_t> samples_in(const Metrics& metrics) {
  const auto found = metrics.find(num_samples);
  if (found == metrics.end() || !found->second.value().is_number()) return {};
  return found->second.value().get<std::int64_t>();
}

/// Returns the accumulator with all its sums set to 0, as if it had no samples.
Json without_samples(const Json& accumulator) {
  detail::observe::MetricAccumulator part;
  from_json(accumulator, part);
  std::ranges::fill(part.sums, 0);  // a score of the AUC then has no weight
  return to_json(part);
}

Json merged(const std::vector<Json>& accumulators) {
  std::vector<detail::observe::MetricAccumulator> all;
  for (const auto& one : accumulators) from_json(one, all.emplace_back());
  return to_json(detail::observe::merged(all));
}

}  // namespace

void AverageMeterCollection::update(const Metrics& metrics, std::optional<std::int64_t> n) {
  const auto samples = n.value_or(samples_in(metrics).value_or(1));
  ++batches_;
  samples_ += samples;
  for (const auto& [name, metric] : metrics) {
    if (name == num_samples) continue;
    detail::observe::require_value(name, metric);
    auto& meter = meters_[name];
    const bool counts_samples = !metric.accumulator().is_null();
    if (meter.last && counts_samples == meter.accumulators.empty())
      throw Error(ExitCode::user_error, "averaging the metric \"" + name + "\"",
                  "it is a metric of samples for some batches and a plain value for others",
                  "Give the same metric under that name for every batch");
    if (counts_samples) {
      meter.last_weight = samples;
      if (samples <= 0 && meter.last) continue;
      constexpr std::size_t most = 256;  // merging takes time and memory, so it is not done for each batch
      if (meter.accumulators.size() == most) meter.accumulators = {merged(meter.accumulators)};
      meter.last = metric;
      if (samples <= 0) meter.last->accumulator_ = without_samples(metric.accumulator());
      meter.accumulators.push_back(meter.last->accumulator_);
      continue;
    }
    const auto weight = samples <= 0 || metric.weight() < 0 ? samples : metric.weight();
    const auto& value = metric.value();
    if (value.is_number()) meter.mean.add(value.get<double>(), weight);
    meter.last_weight = weight;
    if (weight <= 0 && meter.last) continue;  // an empty batch leaves the earlier value
    meter.last = metric;
  }
}

Metrics AverageMeterCollection::summary() const {
  Metrics all{{num_samples, samples_}, {batch_count, batches_}};
  for (const auto& [name, meter] : meters_) {
    auto whole = *meter.last, last = *meter.last;
    if (!meter.accumulators.empty()) {
      whole.accumulator_ = merged(meter.accumulators);
      detail::observe::MetricAccumulator sums;
      from_json(whole.accumulator_, sums);
      whole.value_ = value_of(sums);
      last.weight_ = meter.last_weight;
    } else if (last.value().is_number()) {
      whole = meter.mean;
      last = Metric(last.value().get<double>(), meter.last_weight);
    }
    all.insert_or_assign(name, std::move(whole));
    all.insert_or_assign(std::string(last_prefix) + name, std::move(last));
  }
  return all;
}

Json Timers::stats() const {
  Json all = Json::object();
  for (const auto& [name, seconds] : seconds_) all["mean_" + name + "_s"] = seconds.value();
  return all;
}

}  // namespace muster

namespace muster::detail::operators {
namespace {

Json finite_or_null(const Json& value) {
  return value.is_number_float() && !std::isfinite(value.get<double>()) ? Json(nullptr) : value;
}

/// Sets the weights of the metrics last_NAME, which are those of the last batch. Only workers with samples in the last
/// batch count. If it was empty on all workers, the values come from earlier batches, and all workers that had samples
/// in any batch count equally.
std::vector<Json> with_last_values(std::vector<Json> of_workers) {
  std::set<std::string> counted;
  for (const auto& worker : of_workers)
    for (const auto& [name, value] : worker.items())
      if (value[1] != 0) counted.insert(name);
  for (auto& worker : of_workers)
    for (auto& [name, value] : worker.items()) {
      if (!name.starts_with(last_prefix)) continue;
      if (counted.contains(name)) {
        if (value[1] == 0 && value.size() > 2) value[2] = without_samples(value[2]);
        continue;
      }
      const auto mean = worker.find(name.substr(last_prefix.size()));
      value[1] = mean != worker.end() && (*mean)[1] > 0 ? 1 : 0;
    }
  return of_workers;
}

}  // namespace

Json to_weighted_json(const Metrics& metrics) {
  const auto samples = samples_in(metrics).value_or(1);
  Json all = Json::object();
  for (const auto& [name, metric] : metrics) {
    observe::require_value(name, metric);
    const auto weight = name == batch_count ? 1 : metric.weight() < 0 ? samples : metric.weight();
    auto& values = all[name] = Json::array({metric.value(), weight});
    if (!metric.accumulator().is_null()) values.push_back(metric.accumulator());
  }
  return all;
}

Json reduce_over_workers(const std::vector<Json>& of_workers) {
  auto result = observe::mean_over_ranks(with_last_values(of_workers));
  std::int64_t sum = 0;
  for (const auto& worker : of_workers)
    if (const auto found = worker.find(num_samples); found != worker.end() && (*found)[0].is_number())
      sum += (*found)[0].get<std::int64_t>();
  if (result.contains(num_samples)) result[num_samples] = sum;
  return result;
}

Json list_over_workers(const std::vector<Json>& of_workers) {
  Json all = Json::array();
  for (const auto& worker : of_workers) {
    Json values = Json::object();
    for (const auto& [name, value] : worker.items()) values[name] = finite_or_null(value[0]);
    all.push_back(std::move(values));
  }
  return all;
}

}  // namespace muster::detail::operators
