#include "base/text.hpp"
#include "data/preprocess/column_preprocessor.hpp"
#include "muster/error.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <cmath>
#include <limits>

namespace muster {
namespace {

using detail::data::ColumnPreprocessor;

/// For each feature a power of two near `largest`: dividing by it loses no digit. 1 for 0, NaN and infinity.
at::Tensor units_near(const at::Tensor& largest) {
  const auto values = largest.contiguous();
  auto units = at::ones_like(values);
  for (std::int64_t f = 0; f < values.numel(); ++f)
    if (const auto value = values.const_data_ptr<double>()[f]; std::isfinite(value) && value > 0)
      units.mutable_data_ptr<double>()[f] = std::ldexp(1.0, std::ilogb(value));
  return units;
}

/// Computes (x − shift) / scale per feature. Learns two statistics, a table of [2, features] in double precision; the
/// first one is the shift.
class Scaler : public ColumnPreprocessor {
 public:
  Scaler(std::string kind, std::array<const char*, 2> statistics, std::vector<std::string> columns)
      : ColumnPreprocessor(std::move(kind), std::move(columns)), statistics_(statistics) {}

 protected:
  /// The scale of each feature.
  virtual at::Tensor scale(const at::Tensor& statistics) const = 0;

 private:
  std::string objection(at::ScalarType dtype) const override {
    return c10::isComplexType(dtype) ? "complex numbers have no order and no scale" : "";
  }

  at::Tensor apply(const at::Tensor& x, const at::Tensor& statistics, const std::string& doing) const override {
    const auto features = x.dim() > 1 ? x.size(-1) : 1;
    if (features != statistics.size(1))
      throw Error(ExitCode::data, doing,
                  detail::str("it was fitted to ", statistics.size(1), " features, but is applied to ", features),
                  "Apply it to the data that it was fitted on");
    const auto type = x.scalar_type();
    const auto result = x.is_floating_point() ? type : at::kFloat;
    // Integers of 32 and 64 bits are shifted in double precision, since a float would lose their last digits.
    const auto computed = type == at::kDouble || type == at::kInt || type == at::kLong ? at::kDouble : at::kFloat;
    const auto row = [&](const at::Tensor& values) { return values.to(x.device(), computed); };
    // In units near the statistics neither the difference nor the scale overflows or vanishes.
    const auto units = units_near(at::maximum(statistics[0].abs(), statistics[1].abs()));
    const auto in_units = statistics / units;
    return ((x.to(computed) / row(units) - row(in_units[0])) / row(scale(in_units))).to(result);
  }

  Json to_json(const at::Tensor& statistics) const override {
    Json json;
    for (const int i : {0, 1}) {
      const auto row = statistics[i].contiguous();
      json[statistics_[static_cast<std::size_t>(i)]] =
          std::vector<double>(row.const_data_ptr<double>(), row.const_data_ptr<double>() + row.numel());
    }
    return json;
  }

  at::Tensor from_json(const Json& json) const override {
    const auto first = json.at(statistics_[0]).get<std::vector<double>>();
    const auto second = json.at(statistics_[1]).get<std::vector<double>>();
    if (first.size() != second.size() || first.empty())
      throw Error(ExitCode::data, "restoring a preprocessor", "the saved statistics are of different length",
                  "Resume from another checkpoint");
    return at::stack({at::tensor(first, at::kDouble), at::tensor(second, at::kDouble)});
  }

  std::array<const char*, 2> statistics_;
};

void require_finite(const at::Tensor& statistics, const std::string& doing) {
  if (!at::isfinite(statistics).all().item<bool>())
    throw Error(ExitCode::data, doing, "it holds NaN or infinite values", "Remove or replace those samples");
}

class StandardScaler final : public Scaler {
 public:
  explicit StandardScaler(std::vector<std::string> columns)
      : Scaler("standard_scaler", {"mean", "deviation"}, std::move(columns)) {}

 private:
  /// Rows: count, mean, sum of squared distances from the mean (in units of units_of()), minimum, maximum.
  at::Tensor summary(const at::Tensor& values) const override {
    // Loops and not torch's sums, whose order depends on the number of threads.
    const auto x = values.cpu().to(at::kDouble).contiguous();
    const auto rows = x.size(0), features = x.size(1);
    const auto moments = at::zeros({5, features}, at::kDouble);
    moments[3].copy_(at::amin(x, 0));
    moments[4].copy_(at::amax(x, 0));
    const auto units = units_of(moments);
    const auto* const from = x.const_data_ptr<double>();
    const auto* const unit = units.const_data_ptr<double>();
    auto* const count = moments.mutable_data_ptr<double>();
    auto* const mean = count + features;
    auto* const squares = mean + features;
    const auto for_values = [&](auto&& visit) {
      for (std::int64_t row = 0; row < rows; ++row)
        for (std::int64_t f = 0; f < features; ++f) visit(from[row * features + f] / unit[f], f);
    };
    for_values([&](double value, std::int64_t f) { mean[f] += value; });
    for (std::int64_t f = 0; f < features; ++f) {
      count[f] = static_cast<double>(rows);
      mean[f] /= count[f];
    }
    for_values([&](double value, std::int64_t f) { squares[f] += (value - mean[f]) * (value - mean[f]); });
    for (std::int64_t f = 0; f < features; ++f) mean[f] *= unit[f];
    return moments;
  }

  // Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
  at::Tensor join(const at::Tensor& a, const at::Tensor& b) const override {
    const auto joined = at::stack({a[0] + b[0], a[1], a[2], at::minimum(a[3], b[3]), at::maximum(a[4], b[4])});
    const auto n = joined[0], unit = units_of(joined), mean = a[1] / unit, distance = b[1] / unit - mean;
    const auto squares_of = [&](const at::Tensor& part) { return part[2] * (units_of(part) / unit).square(); };
    joined[1].copy_((mean + distance * b[0] / n) * unit);
    joined[2].copy_(squares_of(a) + squares_of(b) + distance.square() * a[0] * b[0] / n);
    return joined;
  }

  at::Tensor learn(const at::Tensor& moments, const std::string& doing) const override {
    require_finite(moments, doing);
    const auto deviation = (moments[2] / moments[0]).sqrt() * units_of(moments);
    // The deviation of a constant feature is only a rounding error; it must not become the divisor.
    const auto constant = at::logical_or(moments[3] == moments[4], deviation == 0);
    return at::stack({moments[1], at::where(constant, at::full_like(deviation, 1), deviation)});
  }

  /// Returns units near the largest absolute values. Of values in these units, squares neither overflow nor vanish.
  static at::Tensor units_of(const at::Tensor& moments) {
    return units_near(at::maximum(moments[3].abs(), moments[4].abs()));
  }

  at::Tensor scale(const at::Tensor& statistics) const override { return statistics[1]; }
};

class MinMaxScaler final : public Scaler {
 public:
  explicit MinMaxScaler(std::vector<std::string> columns)
      : Scaler("min_max_scaler", {"min", "max"}, std::move(columns)) {}

 private:
  at::Tensor summary(const at::Tensor& values) const override {
    const auto x = values.cpu().to(at::kDouble);
    return at::stack({at::amin(x, 0), at::amax(x, 0)});
  }

  at::Tensor join(const at::Tensor& a, const at::Tensor& b) const override {
    return at::stack({at::minimum(a[0], b[0]), at::maximum(a[1], b[1])});
  }

  at::Tensor learn(const at::Tensor& range, const std::string& doing) const override {
    require_finite(range, doing);
    return range;
  }

  at::Tensor scale(const at::Tensor& range) const override {
    const auto width = range[1] - range[0];
    return at::where(width == 0, at::full_like(width, std::numeric_limits<double>::infinity()), width);
  }
};

}  // namespace

PreprocessorPtr standard_scaler(std::vector<std::string> columns) {
  return std::make_shared<StandardScaler>(std::move(columns));
}

PreprocessorPtr min_max_scaler(std::vector<std::string> columns) {
  return std::make_shared<MinMaxScaler>(std::move(columns));
}

}  // namespace muster
