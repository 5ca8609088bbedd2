// Inference after training: applies a checkpoint's model to one batch, or by all ranks to a whole dataset.
//
//   auto predictor = muster::TorchPredictor::from_checkpoint(*result.checkpoint, net);
//   at::Tensor logits = predictor.predict(muster::Batch({{"x", x}}));
//
//   muster::BatchPredictor(predictor).predict(launch, "test.h5", "predictions.h5", {.keep_columns = {"y"}});
//
// The checkpoint's preprocessor is applied to the batch first, as it was in training.
#pragma once

#include <muster/checkpoint.hpp>
#include <muster/dataset.hpp>
#include <muster/detail/export.hpp>
#include <muster/json.hpp>
#include <muster/preprocessor.hpp>
#include <muster/state.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace muster {

class Launch;

/// A model's predictions for a batch: columns by name, with a row for each row of the batch. A single tensor is the
/// column "predictions".
class MUSTER_API Prediction {
 public:
  Prediction(at::Tensor predictions) : columns_{{"predictions", std::move(predictions)}} {}
  Prediction(std::map<std::string, at::Tensor> columns) : columns_(std::move(columns)) {}

  /// The only column; an Error if there is not exactly one.
  operator at::Tensor() const;
  /// The column of that name; an Error that lists the columns if there is none.
  const at::Tensor& operator[](const std::string& name) const;
  const std::map<std::string, at::Tensor>& columns() const noexcept { return columns_; }

 private:
  std::map<std::string, at::Tensor> columns_;
};

struct PredictorOptions {
  /// Columns that the model gets; empty: all columns of the batch after the preprocessor. If given, other columns that
  /// the preprocessor was fitted on, such as a label, may be missing.
  std::vector<std::string> feature_columns = {};
  /// Converts the model's input columns after the preprocessor, as in {{"x", at::kFloat}}, or all of them, as in
  /// at::kFloat. An Error (ExitCode::usage) if a named column is not among them.
  ColumnTypes dtypes = {};
  /// Computes on this rank's GPU; an Error (ExitCode::data) if there is none.
  bool use_gpu = false;
  /// A preprocessor of your own class, made as for training: it loads its state from the checkpoint. muster's own
  /// preprocessors are made from the checkpoint and need not be given. Without a checkpoint, it must be fitted.
  PreprocessorPtr preprocessor = {};
};

/// A model with its preprocessing, on one rank. Copies are cheap and share the model. Use it in one thread at a time.
class MUSTER_API TorchPredictor {
 public:
  /// Computes predictions from a batch of the feature columns. It may change the batch and write into its tensors.
  using Function = std::function<Prediction(Batch&)>;

  /// A predictor that calls any function of batches; nothing is loaded.
  explicit TorchPredictor(Function predict, PredictorOptions options = {});

  /// Loads the checkpoint's entry "model" into `net` (a module, holder or shared_ptr), and the preprocessor that was
  /// saved with it. A prediction is net->forward() of the only feature column.
  template <class Net>
  static TorchPredictor from_checkpoint(const Checkpoint& checkpoint, Net net, PredictorOptions options = {}) {
    return from_checkpoint(
        checkpoint, net, [net](Batch& batch) mutable -> Prediction { return net->forward(only_column(batch)); },
        std::move(options));
  }
  /// The same with your own function, which calls the module and may use or return several columns:
  ///
  ///   from_checkpoint(checkpoint, net, [net](muster::Batch& batch) mutable {
  ///     return torch::softmax(net->forward(batch["image"], batch["mask"]), 1);
  ///   })
  template <class Net>
  static TorchPredictor from_checkpoint(const Checkpoint& checkpoint, Net net, Function predict,
                                        PredictorOptions options = {}) {
    if constexpr (ModuleHolder<Net>)
      return load(checkpoint, net.ptr(), std::move(predict), std::move(options));
    else
      return load(checkpoint, std::move(net), std::move(predict), std::move(options));
  }

  /// Returns the predictions, on the CPU, computed without gradients and with the module in evaluation mode, which
  /// ends with the call. The batch is not changed; an empty batch (see Batch::size) gets a prediction for its one row.
  /// A preprocessor that uses random numbers gets the same ones for every batch, from a fixed seed. An Error
  /// (ExitCode::data) if the batch lacks a column, or if the preprocessor or the model changes the number of rows.
  Prediction predict(const Batch& batch) const;

 private:
  friend class BatchPredictor;
  static TorchPredictor load(const Checkpoint& checkpoint, std::shared_ptr<torch::nn::Module> module, Function predict,
                             PredictorOptions options);
  static const at::Tensor& only_column(const Batch& batch);
  bool uses_gpu() const noexcept;
  /// The options that all ranks must give alike.
  Json options_to_compare() const;
  /// `kept`: columns that the model does not get unless feature_columns names them.
  Prediction predict(const Batch& batch, const std::vector<std::string>& kept) const;

  struct State;
  explicit TorchPredictor(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

struct BatchPredictorOptions {
  /// Rows per call of the model.
  std::int64_t batch_size = 256;
  /// Columns that are written beside the predictions, as the dataset gives them, before the checkpoint's preprocessor.
  std::vector<std::string> keep_columns = {};
};

/// Computes and writes predictions for a whole dataset, by all ranks of a launch.
class MUSTER_API BatchPredictor {
 public:
  explicit BatchPredictor(TorchPredictor predictor) : predictor_(std::move(predictor)) {}

  /// Writes an HDF5 file, which is a dataset itself: one row for each row of the dataset, in the same order, with
  /// columns of the types that the model returns. The columns of keep_columns are not passed to the model unless
  /// feature_columns names them.
  ///
  /// All ranks must give the same options (an Error with ExitCode::usage names the first that differs) and use the same
  /// model. Each rank computes some of the batches into which the whole dataset is cut. So every row is in the same
  /// batch at any number of ranks, and the file is the same, byte for byte, if the model's results do not depend on the
  /// number of threads (which --threads fixes). The file appears under its name when it is complete and on the disk; an
  /// older file of that name stays until then, even if the job ends early. An error on one rank is thrown on all of
  /// them; a full disk is ExitCode::retry. Call it inside Launch::run(). Collective.
  void predict(const Launch& launch, const Dataset& dataset, const std::filesystem::path& output,
               const BatchPredictorOptions& options = {}) const;

 private:
  TorchPredictor predictor_;
};

}  // namespace muster
