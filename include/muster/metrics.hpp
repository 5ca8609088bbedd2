// Metrics: the values that session.report takes, and running means for a training loop.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/json.hpp>

#include <cmath>
#include <concepts>
#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <utility>

namespace at {
class Tensor;
}

namespace muster {

class AverageMeterCollection;
class SampleMetric;
class StateEntry;

/// A mean over samples. The mean over ranks is weighted by the samples too, so uneven shards do not distort it.
///
/// Put a mean over an epoch into the state: if the run is stopped in the middle, the mean continues with its earlier
/// samples; otherwise it would cover only the rest of the epoch. Let the report at the end of the epoch take() it, so
/// that the checkpoint has an empty mean for the next epoch:
///
///   muster::Mean loss;
///   auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"loss", loss}});
///   …
///     session.report({{"loss", loss.take()}}, state);
class MUSTER_API Mean {
 public:
  /// `value` is itself a mean over `samples` samples; with 0 samples or fewer it is ignored.
  void add(double value, std::int64_t samples = 1) noexcept {
    if (samples <= 0) return;
    sum_ += value * static_cast<double>(samples);
    samples_ += samples;
  }
  /// A tensor of one real number; waits for its value. Any other tensor is an Error (ExitCode::user_error).
  void add(const at::Tensor& value, std::int64_t samples = 1);

  /// The mean so far; NaN before the first sample.
  double value() const noexcept { return samples_ > 0 ? sum_ / static_cast<double>(samples_) : std::nan(""); }
  std::int64_t samples() const noexcept { return samples_; }
  void reset() noexcept { *this = {}; }
  /// Returns the mean so far and resets it.
  Mean take() noexcept { return std::exchange(*this, {}); }

  /// Refers to this object. Each rank saves its own; at another number of ranks, the first rank gets the total of all,
  /// and the other ranks get an empty mean.
  operator StateEntry();

 private:
  double sum_ = 0;
  std::int64_t samples_ = 0;
};

/// One reported value: a number, a Mean, a metric of classification.hpp, a tensor of one real number, or any JSON, such
/// as text or a bool (the value of the first rank that gives one is kept; give 0 or 1 for an average). Give the same
/// kind on every rank. A report rejects any other tensor and names its metric (ExitCode::user_error).
class MUSTER_API Metric {
 public:
  template <std::integral T>
  Metric(T value) : value_(value) {}
  template <std::floating_point T>
  Metric(T value) : value_(static_cast<double>(value)) {}
  Metric(const Mean& mean) : value_(mean.value()), weight_(mean.samples()) {}
  template <class M>
  requires std::is_base_of_v<SampleMetric, M> Metric(const M& metric) : Metric(of_samples(metric)) {}
  Metric(const at::Tensor& value);
  Metric(const char* text) : value_(text) {}
  Metric(Json value) : value_(std::move(value)) {}
  /// A mean over `samples` samples.
  Metric(double value, std::int64_t samples) : value_(value), weight_(samples) {}

  const Json& value() const noexcept { return value_; }
  /// The number of samples behind the value; -1 if the user gave none.
  std::int64_t weight() const noexcept { return weight_; }
  /// The sums from which the value is computed, if a report must add up the sums of all ranks first; otherwise null.
  const Json& accumulator() const noexcept { return accumulator_; }
  /// Why this cannot be reported; empty if it can.
  const std::string& error() const noexcept { return error_; }

 private:
  friend class AverageMeterCollection;  // which merges the accumulators of batches
  static Metric of_samples(const SampleMetric& metric);

  Json value_;
  std::int64_t weight_ = -1;
  Json accumulator_ = {};
  std::string error_ = {};
};

using Metrics = std::map<std::string, Metric>;

}  // namespace muster
