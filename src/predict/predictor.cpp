#include "muster/predictor.hpp"

#include "base/text.hpp"
#include "checkpoint/inspect.hpp"
#include "data/preprocess/apply.hpp"
#include "data/preprocess/registry.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <optional>
#include <set>

namespace muster {
namespace {

const std::string predicting = "predicting";

std::string names_of(const Prediction& prediction) {
  return detail::data::joined(prediction.columns(), [](const auto& column) { return column.first; });
}

/// Returns the current GPU: the one that the rank has chosen, if it has chosen one. Throws an Error if there is none.
at::Device current_gpu() {
  if (at::detail::getCUDAHooks().deviceCount() < 1)
    throw Error(ExitCode::data, "choosing the device", "use_gpu is set, but there is no GPU that this libtorch can use",
                "Set use_gpu to false, or run where there is a GPU with a CUDA build of libtorch");
  return c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
}

/// Puts a module into evaluation mode; the destructor restores the mode of each of its parts.
class EvaluationMode {
 public:
  /// Does nothing if `module` is null.
  explicit EvaluationMode(const std::shared_ptr<torch::nn::Module>& module) {
    if (!module) return;
    for (const auto& part : module->modules()) parts_.emplace_back(part, part->is_training());
    module->eval();
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;
  ~EvaluationMode() {
    for (const auto& [part, is_training] : parts_) part->train(is_training);
  }

 private:
  /// The modes before. Parents come before their children, since train() of a parent also changes its children.
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> parts_;
};

}  // namespace

Prediction::operator at::Tensor() const {
  if (columns_.size() != 1)
    throw Error(ExitCode::usage, "taking a prediction as one tensor", "it has the columns " + names_of(*this),
                "Take one by its name");
  return columns_.begin()->second;
}

const at::Tensor& Prediction::operator[](const std::string& name) const {
  const auto found = columns_.find(name);
  if (found == columns_.end())
    throw Error(ExitCode::usage, "looking into a prediction", "it has no column \"" + name + "\"",
                "Its columns are " + names_of(*this));
  return found->second;
}

struct TorchPredictor::State {
  Function function;
  PredictorOptions options;
  std::shared_ptr<torch::nn::Module> module = {};  ///< null if nothing was loaded
  Json saved = {};                ///< state of the preprocessor in the checkpoint; null if none is to be restored
  at::Device device = at::kCPU;   ///< the module's device
  PreprocessorPtr restored = {};  ///< the preprocessor made from `saved`, for the columns `restored_for`
  std::optional<std::set<std::string>> restored_for = {};  ///< feature columns; none before the first batch

  /// Applies the preprocessor to the batch: the one in `options` to all columns, or one made from `saved` to the
  /// feature columns. These are options.feature_columns, or if that is empty, all columns but `kept`.
  void preprocess(Batch& batch, const std::vector<std::string>& kept);
};

void TorchPredictor::State::preprocess(Batch& batch, const std::vector<std::string>& kept) {
  auto generator = detail::data::make_generator(0);
  if (options.preprocessor) return detail::data::apply(*options.preprocessor, batch, generator);
  if (saved.is_null()) return;
  const auto& named = options.feature_columns;
  if (named.empty())
    for (const auto& column : detail::data::fitted_columns(saved))
      if (!batch.contains(column))
        throw Error(ExitCode::data, predicting,
                    "the preprocessor was fitted on the column \"" + column + "\", but the data has " +
                        detail::data::joined(batch, &Batch::Item::first),
                    "If the model does not need that column, name the model's input in feature_columns");
  std::set<std::string> features(named.begin(), named.end());
  if (named.empty())
    for (const auto& [name, tensor] : batch)
      if (std::ranges::find(kept, name) == kept.end()) features.insert(name);
  if (restored_for != features) {
    restored = detail::data::restore_preprocessor(saved, [&](const auto& column) { return features.contains(column); });
    restored_for = features;
  }
  if (restored) detail::data::apply(*restored, batch, generator);
}

TorchPredictor::TorchPredictor(std::shared_ptr<State> state) : state_(std::move(state)) {}

TorchPredictor::TorchPredictor(Function predict, PredictorOptions options)
    : state_(std::make_shared<State>(State{.function = std::move(predict), .options = std::move(options)})) {
  const std::string doing = "making a predictor";
  if (!state_->function) throw Error(ExitCode::usage, doing, "there is no function", "Give one");
  if (state_->options.preprocessor && detail::data::is_unfitted(*state_->options.preprocessor))
    throw Error(ExitCode::usage, doing, "the preprocessor is not fitted, and no checkpoint gives it a state",
                "Give one that is fitted, or none");
}

TorchPredictor TorchPredictor::load(const Checkpoint& checkpoint, std::shared_ptr<torch::nn::Module> module,
                                    Function predict, PredictorOptions options) {
  const auto state = detail::checkpoint::preprocessor_state(checkpoint.path());
  const auto doing = "restoring the preprocessor of " + checkpoint.path().string();
  if (!state.is_null() && options.preprocessor) {
    try {
      options.preprocessor->load_state(state);
    } catch (const Json::exception& error) {
      throw Error(ExitCode::data, doing, error.what(), "Build the same preprocessor as the run that was saved");
    }
  } else if (!state.is_null() && !detail::data::is_muster_preprocessor(state)) {
    throw Error(ExitCode::usage, doing, "it is of a class of your own",
                "Give PredictorOptions::preprocessor one that is built as the trainer's was");
  }
  checkpoint.load("model", module);
  TorchPredictor predictor(std::move(predict), std::move(options));
  predictor.state_->module = std::move(module);
  if (!predictor.state_->options.preprocessor) predictor.state_->saved = state;
  return predictor;
}

const at::Tensor& TorchPredictor::only_column(const Batch& batch) {
  if (batch.num_columns() != 1)
    throw Error(
        ExitCode::usage, predicting,
        "the batch has the columns " + detail::data::joined(batch, &Batch::Item::first) + ", but forward() takes one",
        "Name it in feature_columns, or give from_checkpoint() a function of the batch");
  return batch.begin()->second;
}

bool TorchPredictor::uses_gpu() const noexcept { return state_->options.use_gpu; }

Json TorchPredictor::options_to_compare() const {
  const auto& options = state_->options;
  Json dtypes = Json::object();
  for (const auto& [name, dtype] : options.dtypes.named()) dtypes[name] = c10::toString(dtype);
  if (const auto all = options.dtypes.all()) dtypes = c10::toString(*all);
  return {{"feature_columns", options.feature_columns}, {"dtypes", dtypes}, {"use_gpu", options.use_gpu}};
}

Prediction TorchPredictor::predict(const Batch& batch) const { return predict(batch, {}); }

Prediction TorchPredictor::predict(const Batch& batch, const std::vector<std::string>& kept) const {
  auto& state = *state_;
  const at::NoGradGuard no_grad;
  const auto device = state.options.use_gpu ? current_gpu() : at::Device(at::kCPU);
  if (state.module) {
    if (device != state.device) state.module->to(device);
    state.device = device;
  }
  const EvaluationMode evaluation(state.module);

  // The preprocessor is user code that may write into tensors, and the caller's batch must not change, so tensors are
  // copied.
  Batch all = batch;
  if (state.options.preprocessor)
    for (const auto& [name, tensor] : batch) all.set(name, tensor.clone());
  state.preprocess(all, kept);
  const auto& named = state.options.feature_columns;
  std::vector<Batch::Item> features;
  const auto take = [&](const std::string& name, const at::Tensor& tensor) {
    auto taken = tensor.to(device, state.options.dtypes.of(name).value_or(tensor.scalar_type()));
    if (batch.contains(name) && taken.is_alias_of(batch[name])) taken = taken.clone();
    features.emplace_back(name, std::move(taken));
  };
  for (const auto& name : named) take(name, all[name]);
  if (named.empty())
    for (const auto& [name, tensor] : all)
      if (std::ranges::find(kept, name) == kept.end()) take(name, tensor);
  Batch input(std::move(features));
  for (const auto& [name, dtype] : state.options.dtypes.named())
    if (!input.contains(name))
      throw Error(
          ExitCode::usage, predicting,
          "dtypes names \"" + name + "\", but the model is given " + detail::data::joined(input, &Batch::Item::first),
          "Name columns that the model is given");

  const auto given = state.function(input);
  const auto rows_of = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.dim() > 0 ? tensor.size(0) : 0;
  };
  const auto expected = batch.num_columns() > 0 ? rows_of(batch.begin()->second) : 0;
  std::map<std::string, at::Tensor> columns;
  for (const auto& [name, tensor] : given.columns()) {
    if (const auto rows = rows_of(tensor); rows != expected)
      throw Error(ExitCode::data, predicting,
                  detail::str("\"", name, "\" has ", rows, " rows for ", expected, " rows of the batch"),
                  "Have the model give one row for each");
    columns[name] = tensor.detach().cpu();
  }
  if (columns.empty()) throw Error(ExitCode::usage, predicting, "the function returned no columns", "Return some");
  return columns;
}

}  // namespace muster
