// Implements the metrics of classification: counts predictions and targets, and puts the metrics into reports and
// states.
#include "muster/classification.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "muster/error.hpp"
#include "muster/metrics.hpp"
#include "observe/metric_accumulator.hpp"
#include "state/stateful.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <mutex>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>

namespace muster {
namespace {

using namespace detail::state;
using detail::observe::MetricAccumulator;

/// The values that count for a metric: one row for each sample, or for each pixel.
struct WeightedRows {
  at::Tensor prediction;  ///< logits [M, C], or one value per row [M]
  at::Tensor target;      ///< [M], integers
  at::Tensor weight;      ///< [M], in double
};

/// Checks the arguments of a metric's add() and turns them into WeightedRows.
class MetricInput {
 public:
  explicit MetricInput(const Json& kind) : doing_("adding to the metric " + kind.at("metric").get<std::string>()) {}

  void require(bool holds, const std::string& fact, std::string_view remedy) const {
    if (!holds) throw Error(ExitCode::user_error, doing_, fact, remedy);
  }

  /// Throws an Error unless each row has a class from 0 to `classes` − 1.
  void require_classes(const char* what, const at::Tensor& of_rows, std::int64_t classes) const {
    if (of_rows.numel() == 0) return;
    const auto [least, most] = of_rows.aminmax();
    const auto low = least.item<std::int64_t>(), high = most.item<std::int64_t>();
    require(low >= 0 && high < classes,
            c10::str(what, " has the class ", low < 0 ? low : high, ", and there are ", classes),
            "Classes are numbered from 0; give a sample without a class the weight 0");
  }

  /// Throws an Error if a row has a negative class.
  void require_not_negative(const char* what, const at::Tensor& of_rows) const {
    if (of_rows.numel() == 0) return;
    const auto least = of_rows.min().item<std::int64_t>();
    require(least >= 0, c10::str(what, " has the class ", least),
            "Classes are numbered from 0; give a sample without a class the weight 0");
  }

  /// Returns the rows of the first `samples` samples (by default of all), without rows of weight 0. If the prediction
  /// consists of logits, the result has logits, too.
  WeightedRows rows_of(const at::Tensor& prediction, const at::Tensor& target, std::optional<std::int64_t> samples,
                       const at::Tensor& weight) const {
    require(prediction.defined() && target.defined(), "a tensor is undefined", "Give the predictions and the targets");
    require(at::isIntegralType(target.scalar_type(), /*includeBool=*/true),
            c10::str("the target is of the type ", target.scalar_type()), "Give classes, as whole numbers or bools");
    const bool logits = prediction.dim() == target.dim() + 1;
    const auto type = prediction.scalar_type();
    require(!logits || type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16,
            c10::str("the logits are of the type ", type), "Give them in floating point, as logits.to(torch::kFloat)");
    require(!c10::isComplexType(type), c10::str("the prediction is of the type ", type), "Give real numbers");
    require(!weight.defined() || !weight.is_complex(), "the weight is a complex number", "Give a real one");
    auto shape = prediction.sizes().vec();
    if (logits && shape.size() > 1) shape.erase(shape.begin() + 1);
    require(target.dim() > 0 && shape == target.sizes(),
            c10::str("the prediction has the shape ", prediction.sizes(), ", the target ", target.sizes()),
            "Predictions are [N, C, ...] or [N, ...] where the target is [N, ...]");
    const auto sample_count = samples.value_or(target.size(0));
    require(sample_count >= 0 && sample_count <= target.size(0),
            c10::str(sample_count, " samples are to count, but there are ", target.size(0)), "Give at most that many");

    const auto flat = [&](const at::Tensor& tensor) {
      return tensor.detach().narrow(0, 0, sample_count).to(prediction.device()).reshape({-1});
    };
    // torch supports few operations on float8 and on uint16 to uint64.
    const auto computable = at::isIntegralType(type, /*includeBool=*/true) ? at::kLong
                            : c10::isFloat8Type(type)                      ? at::kFloat
                                                                           : type;
    WeightedRows all{.prediction = logits ? prediction.detach().narrow(0, 0, sample_count).movedim(1, -1).flatten(0, -2)
                                          : flat(prediction).to(computable),
                     .target = flat(target).to(at::kLong),
                     .weight = {}};
    if (!weight.defined()) {
      all.weight = at::ones({all.target.numel()}, all.target.options().dtype(at::kDouble));
      return all;
    }
    const bool of_samples = weight.dim() == 1 && weight.size(0) == target.size(0);
    require(of_samples || weight.sizes() == target.sizes(),
            c10::str("the weight has the shape ", weight.sizes(), ", the target ", target.sizes()),
            "Give one weight for each sample, or one for each element of the target");
    auto each = weight;
    while (of_samples && each.dim() < target.dim()) each = each.unsqueeze(-1);
    all.weight = flat(each.expand_as(target)).to(at::kDouble);
    require(all.weight.ge(0).logical_and(all.weight.isfinite()).all().item<bool>(),
            "a weight is negative or not a finite number", "Give weights of at least 0; 0 leaves a sample out");
    const auto counts = all.weight.ne(0).nonzero().squeeze(1);
    for (auto* tensor : {&all.prediction, &all.target, &all.weight}) *tensor = tensor->index_select(0, counts);
    return all;
  }

  /// Like rows_of(), but the prediction is one class per row, from 0 to `classes` − 1; for logits, the class of the
  /// largest, or a wrong class if one of them is NaN.
  WeightedRows classified_rows_of(const at::Tensor& prediction, const at::Tensor& target,
                                  std::optional<std::int64_t> samples, const at::Tensor& weight,
                                  std::int64_t classes) const {
    auto all = rows_of(prediction, target, samples, weight);
    require_classes("a target", all.target, classes);
    if (all.prediction.dim() == 2) {
      require(all.prediction.size(1) == classes,
              c10::str("the logits are of ", all.prediction.size(1), " classes, but num_classes is ", classes),
              "Set num_classes to the model's number of classes");
      if (all.prediction.numel() == 0) return all.prediction = all.target, all;
      all.prediction =
          at::where(has_nan(all.prediction), (all.target + 1).remainder(classes), all.prediction.argmax(1));
    } else {
      require(at::isIntegralType(all.prediction.scalar_type(), /*includeBool=*/true),
              c10::str("the prediction has the shape of the target, but is of the type ", all.prediction.scalar_type()),
              "Give classes, as logits.gt(0) for two of them, or logits [N, C, ...]");
      require_classes("a prediction", all.prediction, classes);
    }
    return all;
  }

  /// Returns which rows have a NaN among their logits. Logs a warning the first time that there is one.
  at::Tensor has_nan(const at::Tensor& logits) const {
    const auto rows =
        logits.numel() == 0 ? at::zeros({logits.size(0)}, logits.options().dtype(at::kBool)) : logits.amax(1).isnan();
    static std::once_flag warned;
    if (rows.any().item<bool>())
      std::call_once(warned, [&] {
        detail::log::warn(doing_ +
                          ": a logit is NaN. Such samples count as wrong, and this is said once; "
                          "FailureConfig::bad_numbers finds the step that begins it");
      });
    return rows;
  }

 private:
  std::string doing_;
};

/// Returns the sum of the rows' weights for each class.
at::Tensor sum_by_class(const at::Tensor& classes, const at::Tensor& weight, std::int64_t count) {
  // On a GPU, bincount has no deterministic algorithm.
  if (at::globalContext().deterministicAlgorithms())
    return at::zeros({count}, weight.options())
        .index_put_(c10::List<std::optional<at::Tensor>>({classes}), weight,
                    /*accumulate=*/true);
  return at::bincount(classes, weight, count);
}

/// Returns three sums of weights for each class: of the rows predicted correctly, of the rows predicted to be of the
/// class, and of the rows whose target it is.
at::Tensor by_class(const WeightedRows& rows, std::int64_t classes) {
  const auto right = rows.weight * rows.prediction.eq(rows.target);
  return at::cat({sum_by_class(rows.target, right, classes), sum_by_class(rows.prediction, rows.weight, classes),
                  sum_by_class(rows.target, rows.weight, classes)});
}

/// Returns for which rows the target's logit is among the `k` largest; of equal logits, that of the lower class counts
/// as larger. In a row with a NaN, the result means nothing.
at::Tensor is_in_top_k(const at::Tensor& logits, const at::Tensor& target, std::int64_t k) {
  const auto at = target.unsqueeze(1), its = logits.gather(1, at);
  const auto number = at::arange(logits.size(1), target.options());
  const auto behind = logits.lt(its) | (logits.eq(its) & number.ge(at));
  return behind.logical_not().sum(1).lt(k);
}

Json kind_with_classes(const char* metric, std::int64_t num_classes, std::int64_t least = 1) {
  if (num_classes < least)
    throw Error(ExitCode::usage, detail::str("making the metric ", metric), detail::str("num_classes is ", num_classes),
                "Give the number of classes of the model");
  return {{"metric", metric}, {"num_classes", num_classes}};
}

Json f1_kind(const F1Options& options) {
  constexpr std::array names{"binary", "macro", "micro", "none"};
  auto kind = kind_with_classes("F1", options.num_classes);
  if (options.average == Average::binary && options.num_classes != 2)
    throw Error(ExitCode::usage, "making the metric F1",
                detail::str("Average::binary needs two classes, but num_classes is ", options.num_classes),
                "Choose Average::macro, micro or none");
  kind["average"] = names.at(static_cast<std::size_t>(options.average));
  return kind;
}

Json accuracy_kind(const AccuracyOptions& options) {
  if (options.top_k < 1)
    throw Error(ExitCode::usage, "making the metric accuracy", detail::str("top_k is ", options.top_k),
                "Give at least 1, for the largest logit alone");
  return {{"metric", "accuracy"}, {"top_k", options.top_k}};
}

class StatefulMetric : public Stateful {
 public:
  StatefulMetric(const Json& kind, std::vector<double>& sums) : kind_(kind), sums_(&sums) {}

  StateDict save(const ParameterPaths&) const override { return {.values = to_json(MetricAccumulator{kind_, *sums_})}; }
  Json quick_values() const override {
    return {sums_->size(), value_to_json(std::accumulate(sums_->begin(), sums_->end(), 0.0))};
  }

  void compare(const StateDict& saved, const ParameterPaths&, Differences& differences) const override {
    if (MetricAccumulator accumulator; !saved.tensors.empty() || !from_json(saved.values, accumulator))
      differences.push_back({"", "the metric " + detail::json_text(kind_) + " here, something else in the checkpoint"});
    else if (accumulator.kind != kind_ || !fits(accumulator.sums.size()))
      differences.push_back({"", "the metric " + detail::json_text(kind_) + " here, " +
                                     detail::json_text(accumulator.kind) + " in the checkpoint"});
  }

  void load(const StateDict& saved, const ParameterPaths&) override {
    MetricAccumulator accumulator;
    from_json(saved.values, accumulator);
    *sums_ = std::move(accumulator.sums);
  }

  Replication replication() const override { return Replication::per_rank; }

  std::optional<StateDict> redistribute(const StateDict& all, RankInGroup here) const override {
    std::vector<MetricAccumulator> ranks;
    for (const auto& rank : all.values) {
      if (!from_json(rank, ranks.emplace_back()) || ranks.back().kind != kind_ || !fits(ranks.back().sums.size()))
        return StateDict{.values = rank};  // StatefulMetric's compare() reports the difference
    }
    MetricAccumulator whole = detail::observe::merged(ranks);
    if (here.rank != 0) is_list() ? whole.sums.clear() : void(std::ranges::fill(whole.sums, 0.0));
    return StateDict{.values = to_json(whole)};
  }

 private:
  bool is_list() const { return kind_.at("metric") == "AUC"; }
  bool fits(std::size_t sums) const {
    return is_list() ? sums % detail::observe::per_score == 0 : sums == sums_->size();
  }

  Json kind_;
  std::vector<double>* sums_;
};

}  // namespace

SampleMetric::SampleMetric(Json kind, std::int64_t sums)
    : kind_(std::move(kind)), sums_(static_cast<std::size_t>(sums)) {}

void SampleMetric::reset() noexcept {
  if (kind_.at("metric") == "AUC") return sums_.clear();
  std::ranges::fill(sums_, 0.0);
}

Json SampleMetric::evaluate() const { return detail::observe::value_of({kind_, sums_}); }

void SampleMetric::count(const at::Tensor& sums) {
  const auto here = sums.to(at::kDouble).cpu().contiguous();
  const auto* const numbers = here.const_data_ptr<double>();
  std::transform(numbers, numbers + here.numel(), sums_.begin(), sums_.begin(), std::plus<>());
}

std::int64_t SampleMetric::num_classes() const { return kind_.at("num_classes"); }

SampleMetric::operator StateEntry() { return StateEntry(std::make_shared<StatefulMetric>(kind_, sums_)); }

Metric Metric::of_samples(const SampleMetric& metric) {
  Metric made(metric.evaluate());
  made.accumulator_ = to_json(detail::observe::merged({MetricAccumulator{metric.kind_, metric.sums_}}));
  return made;
}

Accuracy::Accuracy(const AccuracyOptions& options) : SampleMetric(accuracy_kind(options), 2) {}

void Accuracy::add(const at::Tensor& prediction, const at::Tensor& target, Samples samples, const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  const MetricInput input(kind_);
  const auto top_k = kind_.at("top_k").get<std::int64_t>();
  const auto all = input.rows_of(prediction, target, samples, weight);
  at::Tensor right;
  if (all.prediction.dim() == 2) {
    input.require_classes("a target", all.target, all.prediction.size(1));
    right = is_in_top_k(all.prediction, all.target, top_k).logical_and(input.has_nan(all.prediction).logical_not());
  } else {
    input.require(top_k == 1, detail::str("the prediction holds classes, but top_k is ", top_k),
                  "Give logits [N, C, ...]");
    input.require(!at::isFloatingType(all.prediction.scalar_type()),
                  "the prediction holds floating-point numbers, not classes",
                  "Give classes, as logits.gt(0) for two of them, or logits [N, C, ...]");
    input.require_not_negative("a target", all.target);
    input.require_not_negative("a prediction", all.prediction);
    right = all.prediction.eq(all.target);
  }
  count(at::stack({(all.weight * right).sum(), all.weight.sum()}));
}

double Accuracy::value() const { return evaluate(); }

F1::F1(const F1Options& options) : SampleMetric(f1_kind(options), 3 * options.num_classes) {}

void F1::add(const at::Tensor& prediction, const at::Tensor& target, Samples samples, const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  const auto classes = num_classes();
  count(by_class(MetricInput(kind_).classified_rows_of(prediction, target, samples, weight, classes), classes));
}

double F1::value() const {
  const auto value = evaluate();
  return value.is_array() ? std::nan("") : value.get<double>();
}
std::vector<double> F1::per_class() const { return detail::observe::f1_by_class(sums_); }

ConfusionMatrix::ConfusionMatrix(const ConfusionMatrixOptions& options)
    : SampleMetric(kind_with_classes("confusion matrix", options.num_classes),
                   options.num_classes * options.num_classes) {}

void ConfusionMatrix::add(const at::Tensor& prediction, const at::Tensor& target, Samples samples,
                          const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  const auto classes = num_classes();
  const auto all = MetricInput(kind_).classified_rows_of(prediction, target, samples, weight, classes);
  count(sum_by_class(all.target * classes + all.prediction, all.weight, classes * classes));
}

at::Tensor ConfusionMatrix::value() const {
  return at::tensor(sums_, at::kDouble).view({num_classes(), num_classes()});
}

MeanIoU::MeanIoU(const MeanIoUOptions& options)
    : SampleMetric(kind_with_classes("mean IoU", options.num_classes), 3 * options.num_classes) {}

void MeanIoU::add(const at::Tensor& prediction, const at::Tensor& target, Samples samples, const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  const auto classes = num_classes();
  count(by_class(MetricInput(kind_).classified_rows_of(prediction, target, samples, weight, classes), classes));
}

double MeanIoU::value() const { return evaluate(); }
std::vector<double> MeanIoU::per_class() const { return detail::observe::iou_by_class(sums_); }

/// Returns scores as [N, 2] on the CPU: each score as a double, and the difference to the exact whole number.
static at::Tensor double_and_rest(const at::Tensor& scores, bool is_unsigned) {
  const auto here = scores.cpu().contiguous();
  if (here.scalar_type() != at::kLong)
    return at::stack({here.to(at::kDouble), at::zeros({here.numel()}, at::kDouble)}, 1);
  auto both = at::empty({here.numel(), 2}, at::kDouble);
  const auto split = [](auto score, double* to) {
    to[0] = static_cast<double>(score);
    // A long double holds every 64-bit number.
    to[1] = static_cast<double>(static_cast<long double>(score) - static_cast<long double>(to[0]));
  };
  const auto* const from = here.const_data_ptr<std::int64_t>();
  auto* const to = both.mutable_data_ptr<double>();
  for (std::int64_t i = 0; i < here.numel(); ++i)
    is_unsigned ? split(static_cast<std::uint64_t>(from[i]), to + 2 * i) : split(from[i], to + 2 * i);
  return both;
}

AUC::AUC() : SampleMetric(Json{{"metric", "AUC"}, {"numbers_per_score", detail::observe::per_score}}) {}

void AUC::add(const at::Tensor& score, const at::Tensor& target, Samples samples, const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  const MetricInput input(kind_);
  const auto all = input.rows_of(score, target, samples, weight);
  input.require(all.prediction.dim() == 1, "there are scores of several classes for each sample",
                "Give one score per sample, as probabilities.select(1, 1)");
  input.require_classes("a target", all.target, 2);
  const auto ones = all.weight * all.target;
  const auto scores = double_and_rest(all.prediction, score.scalar_type() == at::kUInt64);
  const auto rows = at::cat({scores, at::stack({all.weight - ones, ones}, 1).cpu()}, 1);
  const auto* const numbers = rows.const_data_ptr<double>();
  sums_.insert(sums_.end(), numbers, numbers + rows.numel());
}

double AUC::value() const { return evaluate(); }

Perplexity::Perplexity() : SampleMetric(Json{{"metric", "perplexity"}}, 2) {}

void Perplexity::add(const at::Tensor& logits, const at::Tensor& target, Samples samples, const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  const MetricInput input(kind_);
  const auto all = input.rows_of(logits, target, samples, weight);
  input.require(all.prediction.dim() == 2, "there is one number for each token", "Give logits [N, C, ...]");
  input.require_classes("a target", all.target, all.prediction.size(1));
  const auto wide =
      at::isReducedFloatingType(all.prediction.scalar_type()) ? all.prediction.to(at::kFloat) : all.prediction;
  const auto losses = wide.log_softmax(1).gather(1, all.target.unsqueeze(1)).squeeze(1).neg().to(at::kDouble);
  count(at::stack({(losses * all.weight).sum(), all.weight.sum()}));
}

void Perplexity::add(const at::Tensor& loss, std::int64_t tokens) {
  if (tokens <= 0) return;
  const at::NoGradGuard no_grad;
  const MetricInput input(kind_);
  input.require(loss.defined(), "the loss is undefined", "Give the mean of cross_entropy");
  input.require(loss.numel() > 0 && !loss.is_complex(),
                c10::str("the loss is ", loss.scalar_type(), " of the shape ", loss.sizes()),
                "Give the mean of cross_entropy, or several that are means over equally many tokens");
  sums_[0] += loss.to(at::kDouble).mean().item<double>() * static_cast<double>(tokens);
  sums_[1] += static_cast<double>(tokens);
}

double Perplexity::value() const { return evaluate(); }

}  // namespace muster
