// Metrics that no mean over batches or ranks gives: accuracy, F1, confusion matrix, area under the ROC curve, mean IoU,
// perplexity. Each keeps counts, or scores; reported, those of all ranks are put together before the value is made of
// them, so uneven shards give what one rank with all samples would.
//
//   muster::Accuracy top5({.top_k = 5});
//   muster::F1 f1({.num_classes = 10, .average = muster::Average::macro});
//   for (auto& batch : validation.iter_torch_batches({.batch_size = 256})) {
//     const auto logits = net->forward(batch["x"]);
//     top5.add(logits, batch["y"], batch.size());
//     f1.add(logits, batch["y"], batch.size());
//   }
//   session.report({{"val_top5", top5}, {"val_f1", f1}});
//
// Here the metrics are made anew for each validation. One that lives longer, as the accuracy over a training epoch
// does, is taken by the report that ends the epoch, {"accuracy", accuracy.take()}, so that what is saved there begins
// the next.
//
// A dataset that is not split (DataConfig) is whole on each worker, so each sample counts once per worker. That changes
// no ratio, but the counts of a ConfusionMatrix: a report warns.
//
// What add() takes, unless it says otherwise:
//
//   prediction  logits or probabilities [N, C, …], as torch::cross_entropy takes them, or classes [N, …]
//   target      classes [N, …]: integers from 0, or bools
//   samples     only the first so many of N count, as Batch::size() says; all of them unless given
//   weight      what each counts, [N] or in the shape of the target: numbers, or a mask of bools. Those that count
//               nothing are not looked at: iou.add(logits, target, batch.size(), target.ne(255))
//
// It waits for the values; what does not fit is an Error (ExitCode::user_error). value() is this rank's alone, NaN
// where nothing defines it, which a report writes as null.
#pragma once

#include <muster/json.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster {

class Metric;
class StateEntry;

/// What these metrics have in common. One over a training epoch belongs into the state, and the report that ends the
/// epoch takes it; see Mean. Each has take(): what it is until now; it begins anew.
class SampleMetric {
 public:
  void reset() noexcept;

  /// Refers to this. Each rank's own in a checkpoint; at another number of ranks the first gets what all had.
  operator StateEntry();

 protected:
  using Samples = std::optional<std::int64_t>;
  explicit SampleMetric(Json kind, std::int64_t sums = 0);
  ~SampleMetric() = default;
  SampleMetric(const SampleMetric&) = default;
  SampleMetric& operator=(const SampleMetric&) = default;

  /// Of this rank's samples.
  Json evaluate() const;
  /// Adds to the sums.
  void count(const at::Tensor& sums);
  template <class M>
  static M taken(M& metric) {
    M before = metric;
    metric.reset();
    return before;
  }
  std::int64_t num_classes() const;

  Json kind_;  ///< its name and options, which are the same on all ranks
  std::vector<double> sums_;

 private:
  friend class Metric;
};

struct AccuracyOptions {
  /// Of how many of the largest logits the target's is to be one. Of equal logits the first is the larger.
  std::int64_t top_k = 1;
};
void to_json(Json& json, const AccuracyOptions& options);
void from_json(const Json& json, AccuracyOptions& options);

/// The part of the samples that are classified rightly. With `top_k` above 1 it takes logits.
class Accuracy : public SampleMetric {
 public:
  Accuracy(const AccuracyOptions& options = {});
  void add(const at::Tensor& prediction, const at::Tensor& target, Samples samples = {}, const at::Tensor& weight = {});
  double value() const;
  Accuracy take() { return taken(*this); }
};

enum class Average {
  binary,  ///< of class 1, of two
  macro,   ///< the mean over the classes that there are, in predictions or targets
  micro,   ///< of all classes' counts together, which is the accuracy
  none,    ///< one for each class: a list in the report
};

struct F1Options {
  std::int64_t num_classes = 2;
  Average average = Average::binary;
};
void to_json(Json& json, const F1Options& options);
void from_json(const Json& json, F1Options& options);

/// The harmonic mean of precision and recall. As scikit-learn's f1_score with zero_division = nan: a class that neither
/// a prediction nor a target has is undefined and not part of the mean.
class F1 : public SampleMetric {
 public:
  F1(const F1Options& options = {});
  void add(const at::Tensor& prediction, const at::Tensor& target, Samples samples = {}, const at::Tensor& weight = {});
  /// NaN with Average::none.
  double value() const;
  F1 take() { return taken(*this); }
  std::vector<double> per_class() const;
};

struct ConfusionMatrixOptions {
  std::int64_t num_classes = 2;
};
void to_json(Json& json, const ConfusionMatrixOptions& options);
void from_json(const Json& json, ConfusionMatrixOptions& options);

/// How many samples of each class, by row, were taken for which, by column. A list of rows in the report.
class ConfusionMatrix : public SampleMetric {
 public:
  ConfusionMatrix(const ConfusionMatrixOptions& options = {});
  void add(const at::Tensor& prediction, const at::Tensor& target, Samples samples = {}, const at::Tensor& weight = {});
  /// [num_classes, num_classes], in double.
  at::Tensor value() const;
  ConfusionMatrix take() { return taken(*this); }
};

struct MeanIoUOptions {
  std::int64_t num_classes = 2;
};
void to_json(Json& json, const MeanIoUOptions& options);
void from_json(const Json& json, MeanIoUOptions& options);

/// Intersection over union of segmentations: of each class over all pixels of all samples, then the mean over the
/// classes that there are, in predictions or targets, as torchmetrics' JaccardIndex.
class MeanIoU : public SampleMetric {
 public:
  MeanIoU(const MeanIoUOptions& options = {});
  void add(const at::Tensor& prediction, const at::Tensor& target, Samples samples = {}, const at::Tensor& weight = {});
  double value() const;
  MeanIoU take() { return taken(*this); }
  std::vector<double> per_class() const;
};

/// The area under the ROC curve of two classes: how often a sample of class 1 has a larger score than one of class 0,
/// where equal ones count half (the statistic of Mann and Whitney; Hanley and McNeil 1982, doi:10.1148/radiology.143.1.
/// 7063747). Exact, from the scores of all samples, which it keeps and a report gathers: some 30 bytes for each.
/// Undefined where one of the classes is missing, or a score is NaN.
class AUC : public SampleMetric {
 public:
  AUC();
  /// `score`: of class 1, [N, …], any numbers that order the samples.
  void add(const at::Tensor& score, const at::Tensor& target, Samples samples = {}, const at::Tensor& weight = {});
  double value() const;
  AUC take() { return taken(*this); }
};

/// exp of the mean negative log-likelihood of tokens.
class Perplexity : public SampleMetric {
 public:
  Perplexity();
  /// `logits`: [N, C, …], as cross_entropy takes them.
  void add(const at::Tensor& logits, const at::Tensor& target, Samples samples = {}, const at::Tensor& weight = {});
  /// What cross_entropy gave as the mean over so many tokens; with 0 of them it is ignored.
  void add(const at::Tensor& loss, std::int64_t tokens);
  double value() const;
  Perplexity take() { return taken(*this); }
};

}  // namespace muster
