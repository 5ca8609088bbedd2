// Metrics that cannot be computed as a mean over batches or ranks: accuracy, F1, confusion matrix, area under the ROC
// curve, mean IoU, perplexity. Each metric keeps counts, or scores. A report combines the counts or scores of all ranks
// before it computes the value, so uneven shards give the same value as one rank with all samples.
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
// Here the metrics are made anew for each validation. For a metric that lives longer, such as the accuracy over a
// training epoch, let the report at the end of the epoch take it, {"accuracy", accuracy.take()}: then the checkpoint
// has a metric that is empty again, for the next epoch.
//
// A dataset that is not split (DataConfig) is whole on each worker, so each sample counts once per worker. This changes
// no ratio, but it does change the counts of a ConfusionMatrix: a report warns about it.
//
// The arguments of add(), unless it says otherwise:
//
//   prediction  logits or probabilities [N, C, …], in floating point of 16 bits or more, as torch::cross_entropy takes
//               them, or classes [N, …]
//   target      classes [N, …]: integers from 0, or bools
//   samples     how many of the N samples count (the first ones), as Batch::size() says; default: all
//   weight      the weight of each sample, [N], or of each element of the target, in its shape: numbers of at least 0,
//               or a mask of bools. Weight 0 leaves out: iou.add(logits, target, batch.size(), target.ne(255))
//
// A sample with a NaN among its logits counts as wrong: if a metric needs a predicted class, it is the class after the
// target. A warning says so once.
//
// add() waits for the tensors' values. Arguments that do not fit are an Error (ExitCode::user_error). value() is this
// rank's value only; where it is undefined it is NaN, which a report writes as null.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/json.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster {

class Metric;
class StateEntry;

/// The base class of these metrics. Put a metric over a training epoch into the state, and let the report at the end of
/// the epoch take() it; see Mean. take() returns the metric so far and resets it.
class MUSTER_API SampleMetric {
 public:
  void reset() noexcept;

  /// Refers to this object. Each rank saves its own; at another number of ranks, the first rank gets the total of all,
  /// and the other ranks get an empty metric.
  operator StateEntry();

 protected:
  using Samples = std::optional<std::int64_t>;
  explicit SampleMetric(Json kind, std::int64_t sums = 0);
  ~SampleMetric() = default;
  SampleMetric(const SampleMetric&) = default;
  SampleMetric& operator=(const SampleMetric&) = default;

  /// Returns the metric's value for this rank's samples; NaN where it is undefined.
  Json evaluate() const;
  /// Adds `sums` to the metric's sums, element by element.
  void count(const at::Tensor& sums);
  template <class M>
  static M taken(M& metric) {
    M before = metric;
    metric.reset();
    return before;
  }
  std::int64_t num_classes() const;

  Json kind_;  ///< the metric's name and options; the same on all ranks
  std::vector<double> sums_;

 private:
  friend class Metric;
};

struct AccuracyOptions {
  /// A sample counts as correct if its class is among this many largest logits. Of equal logits, the first counts as
  /// larger.
  std::int64_t top_k = 1;
};

/// The fraction of the samples that are classified correctly. With `top_k` above 1, add() takes logits only.
class MUSTER_API Accuracy : public SampleMetric {
 public:
  Accuracy(const AccuracyOptions& options = {});
  void add(const at::Tensor& prediction, const at::Tensor& target, Samples samples = {}, const at::Tensor& weight = {});
  double value() const;
  Accuracy take() { return taken(*this); }
};

enum class Average {
  binary,  ///< the F1 of class 1; there are two classes
  macro,   ///< the mean of F1 over the classes that occur in predictions or targets
  micro,   ///< the F1 of the counts of all classes together, which is the accuracy
  none,    ///< one value for each class: a list in the report
};

struct F1Options {
  std::int64_t num_classes = 2;
  Average average = Average::binary;
};

/// The harmonic mean of precision and recall, as scikit-learn's f1_score with zero_division = nan: a class that occurs
/// neither in predictions nor in targets is undefined and left out of the mean.
class MUSTER_API F1 : public SampleMetric {
 public:
  F1(const F1Options& options = {});
  void add(const at::Tensor& prediction, const at::Tensor& target, Samples samples = {}, const at::Tensor& weight = {});
  /// This rank's F1; NaN with Average::none, for which per_class() has the values.
  double value() const;
  F1 take() { return taken(*this); }
  std::vector<double> per_class() const;
};

struct ConfusionMatrixOptions {
  std::int64_t num_classes = 2;
};

/// The number of samples by class (row) and predicted class (column). A list of rows in the report.
class MUSTER_API ConfusionMatrix : public SampleMetric {
 public:
  ConfusionMatrix(const ConfusionMatrixOptions& options = {});
  void add(const at::Tensor& prediction, const at::Tensor& target, Samples samples = {}, const at::Tensor& weight = {});
  /// This rank's counts, [num_classes, num_classes], in double.
  at::Tensor value() const;
  ConfusionMatrix take() { return taken(*this); }
};

struct MeanIoUOptions {
  std::int64_t num_classes = 2;
};

/// Intersection over union of segmentations: for each class over all pixels of all samples, then the mean over the
/// classes that occur in predictions or targets, as torchmetrics' JaccardIndex.
class MUSTER_API MeanIoU : public SampleMetric {
 public:
  MeanIoU(const MeanIoUOptions& options = {});
  void add(const at::Tensor& prediction, const at::Tensor& target, Samples samples = {}, const at::Tensor& weight = {});
  double value() const;
  MeanIoU take() { return taken(*this); }
  std::vector<double> per_class() const;
};

/// The area under the ROC curve of two classes: the probability that a sample of class 1 has a larger score than one of
/// class 0, where equal scores count half (the Mann-Whitney statistic; Hanley and McNeil 1982,
/// doi:10.1148/radiology.143.1.7063747). It is exact, also for whole numbers that a double cannot hold: it keeps the
/// scores of all samples, 32 bytes each, and a report gathers them. Undefined if one of the classes is missing or a
/// score is NaN.
class MUSTER_API AUC : public SampleMetric {
 public:
  AUC();
  /// `score`: the score of class 1, [N, …], any real numbers that order the samples.
  void add(const at::Tensor& score, const at::Tensor& target, Samples samples = {}, const at::Tensor& weight = {});
  double value() const;
  AUC take() { return taken(*this); }
};

/// The perplexity: exp of the mean negative log-likelihood of the tokens.
class MUSTER_API Perplexity : public SampleMetric {
 public:
  Perplexity();
  /// `logits`: [N, C, …], as cross_entropy takes them.
  void add(const at::Tensor& logits, const at::Tensor& target, Samples samples = {}, const at::Tensor& weight = {});
  /// `loss`: the mean of cross_entropy over `tokens` tokens; ignored if `tokens` is not above 0. If `loss` has several
  /// elements, their mean is used.
  void add(const at::Tensor& loss, std::int64_t tokens);
  double value() const;
  Perplexity take() { return taken(*this); }
};

}  // namespace muster
