// Inference after training: the model of a checkpoint over a batch, or over a dataset by all ranks.
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

/// What a model makes of a batch: columns by name, with a row for each of the batch's. A tensor alone is the column
/// "predictions".
class Prediction {
 public:
  Prediction(at::Tensor predictions) : columns_{{"predictions", std::move(predictions)}} {}
  Prediction(std::map<std::string, at::Tensor> columns) : columns_(std::move(columns)) {}

  /// The column, where there is one; an Error otherwise.
  operator at::Tensor() const;
  /// The column of that name; an Error that lists the columns if there is none.
  const at::Tensor& operator[](const std::string& name) const;
  const std::map<std::string, at::Tensor>& columns() const noexcept { return columns_; }

 private:
  std::map<std::string, at::Tensor> columns_;
};

struct PredictorOptions {
  /// Columns that the model is given; all unless given. Others that the preprocessor was fitted on, such as a label,
  /// need not be there then.
  std::vector<std::string> feature_columns = {};
  /// Converts what the model is given, after the preprocessor, as in {{"x", at::kFloat}}, or all of it, as in
  /// at::kFloat. An Error (ExitCode::usage) if a name is not among it.
  ColumnTypes dtypes = {};
  /// Computes on this rank's GPU; an Error (ExitCode::data) where there is none.
  bool use_gpu = false;
  /// One of your own class, built as that of the training was: it gets the state that the checkpoint has of it. Those
  /// that muster makes are made from the checkpoint, and need not be given. Without a checkpoint, a fitted one.
  PreprocessorPtr preprocessor = {};
};
void to_json(Json& json, const PredictorOptions& options);
void from_json(const Json& json, PredictorOptions& options);

/// A model and what stands before it, on one rank. Copies are cheap and share the model. One thread at a time.
class TorchPredictor {
 public:
  /// What a batch of the feature columns becomes; it may change the batch, and write into its tensors.
  using Function = std::function<Prediction(Batch&)>;

  /// Any function of batches. Nothing is loaded.
  explicit TorchPredictor(Function predict, PredictorOptions options = {});

  /// Loads the entry "model" of the checkpoint into `net`, a module or what holds one, and takes the preprocessor that
  /// was saved with it. A prediction is net->forward() of the feature column.
  template <class Net>
  static TorchPredictor from_checkpoint(const Checkpoint& checkpoint, Net net, PredictorOptions options = {}) {
    return from_checkpoint(
        checkpoint, net, [net](Batch& batch) mutable -> Prediction { return net->forward(only_column(batch)); },
        std::move(options));
  }
  /// With a function of one's own around the module, which takes several columns, or gives several:
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

  /// The predictions, on the CPU, without gradients; the module is in evaluation mode. The batch stays as it is; of one
  /// that is left empty (Batch::size) there is a prediction for the row that it has. A preprocessor that draws random
  /// numbers draws the same for every batch, from a fixed seed. An Error (ExitCode::data) where the batch lacks a
  /// column, or the preprocessor or the model gives another number of rows.
  Prediction predict(const Batch& batch) const;

 private:
  friend class BatchPredictor;
  static TorchPredictor load(const Checkpoint& checkpoint, std::shared_ptr<torch::nn::Module> module, Function predict,
                             PredictorOptions options);
  static const at::Tensor& only_column(const Batch& batch);
  bool uses_gpu() const noexcept;
  /// `kept`: columns that are no features unless they are named.
  Prediction predict(const Batch& batch, const std::vector<std::string>& kept) const;

  struct State;
  explicit TorchPredictor(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

struct BatchPredictorOptions {
  /// Rows that the model is given at a time.
  std::int64_t batch_size = 256;
  /// Columns of the dataset that are written beside the predictions, as they are stored.
  std::vector<std::string> keep_columns = {};
};
void to_json(Json& json, const BatchPredictorOptions& options);
void from_json(const Json& json, BatchPredictorOptions& options);

/// Predictions for a whole dataset, made and written by all ranks of a launch.
class BatchPredictor {
 public:
  explicit BatchPredictor(TorchPredictor predictor) : predictor_(std::move(predictor)) {}

  /// Writes an HDF5 file, a dataset itself, with a row for each of the dataset's, in its order: columns of the types
  /// that the model gives. Columns that are kept are not given to the model unless feature_columns names them.
  ///
  /// Batches are cut from the whole dataset, and each rank takes a stretch of them: so every row is computed in the
  /// same batch at any number of ranks, and the file is the same, byte for byte, as far as the model computes the same
  /// with another number of threads (--threads fixes it). The file has its name when it is whole and on the disk; one
  /// that was there stays until then, and whatever ends the job before. An error on one rank is the same on all; a full
  /// disk is ExitCode::retry. Inside Launch::run. Collective.
  void predict(const Launch& launch, const Dataset& dataset, const std::filesystem::path& output,
               const BatchPredictorOptions& options = {}) const;

 private:
  TorchPredictor predictor_;
};

}  // namespace muster
