// Implementation of muster/operator.hpp; nothing in it is for users.
#pragma once

#include <muster/dataset.hpp>
#include <muster/detail/export.hpp>
#include <muster/detail/worker.hpp>
#include <muster/optimizer.hpp>
#include <muster/state.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster {

class Session;
struct DataLoaderOptions;
template <class Dataset>
class DataLoader;

namespace detail::data {
MUSTER_API Worker worker_of(const Session& session);
}

namespace detail::operators {

class OperatorRun;
struct OperatorRegistry;
using Forward = std::function<at::Tensor(const std::vector<at::Tensor>& features)>;
using Criterion = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

// Data.

/// The passes over a worker's data, one at a time.
class Passes {
 public:
  virtual ~Passes() = default;
  /// Begins a pass of the given epoch; its first batch becomes the current one.
  virtual void begin(std::int64_t epoch) = 0;
  /// Makes the next batch the current one.
  virtual void advance() = 0;
  /// The current batch; null if the pass is over.
  virtual Batch* current() = 0;
  /// The dataset's name if the program has not given an order of its batches' columns; otherwise empty. Call it after
  /// the first batch.
  virtual std::optional<std::string> without_column_order() { return {}; }
  /// Ends the current pass.
  virtual void end() = 0;
};

/// The options with which MakePasses is called.
struct PassesOptions {
  bool training = true;
  bool split = true;  ///< true: the samples are divided among the workers
};
/// Makes the passes over a worker's data. Collective over the workers.
using MakePasses = std::function<std::unique_ptr<Passes>(OperatorRegistry& parts, const PassesOptions& options)>;

/// The batches of one call of an operator trainer's train() or validate().
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  /// The next batch; null if the call has had all of its batches.
  virtual Batch* next() = 0;
  /// Begins an iteration over the batches and returns its first batch; null if there is none.
  virtual Batch* first() { return next(); }
};

MUSTER_API at::Tensor stacked(const std::vector<at::Tensor>& examples);
MUSTER_API Batch make_batch(at::Tensor data, at::Tensor target, std::int64_t samples,
                            std::shared_ptr<const step::BatchWeight> step);
MUSTER_API const Session& session_of(const OperatorRegistry& parts);

/// Makes a batch from what a data loader returns: an example whose data and target are stacked tensors, or a range of
/// single examples.
template <class Examples>
Batch batch_of(Examples& examples, std::int64_t samples, const std::shared_ptr<const step::BatchWeight>& step) {
  if constexpr (requires {
                  { examples.data } -> std::convertible_to<at::Tensor>;
                  { examples.target } -> std::convertible_to<at::Tensor>;
                }) {
    return make_batch(examples.data, examples.target, samples, step);
  } else {
    static_assert(std::ranges::range<Examples>, "An operator's data loader gives examples of a tensor and a target.");
    std::vector<at::Tensor> data, targets;
    for (auto& example : examples) {
      data.push_back(example.data);
      targets.push_back(example.target);
    }
    return make_batch(stacked(data), stacked(targets), samples, step);
  }
}

template <class Loader>
class LoaderPasses final : public Passes {
 public:
  explicit LoaderPasses(std::unique_ptr<Loader> loader) : loader_(std::move(loader)) {}
  void begin(std::int64_t epoch) override {
    at_.reset();
    loader_->set_epoch(epoch);
    at_ = loader_->begin();
    take();
  }
  void advance() override {
    ++*at_;
    take();
  }
  Batch* current() override { return batch_ ? &*batch_ : nullptr; }
  void end() override {
    batch_.reset();
    at_.reset();
  }

 private:
  void take() {
    batch_.reset();
    if (!(*at_ == loader_->end())) batch_ = batch_of(**at_, loader_->batch_samples(), loader_->step());
  }

  std::unique_ptr<Loader> loader_;
  std::optional<typename Loader::iterator> at_;
  std::optional<Batch> batch_;
};

[[noreturn]] MUSTER_API void refuse_loader();
[[noreturn]] MUSTER_API void refuse_divided_loader();

template <class Loader>
MakePasses make_passes_of(std::unique_ptr<Loader> loader) {
  // std::function needs a copyable callable, so the loader is shared; it can be used only once.
  const auto owner = std::make_shared<std::unique_ptr<Loader>>(std::move(loader));
  return [owner](OperatorRegistry&, const PassesOptions& options) -> std::unique_ptr<Passes> {
    if (!*owner) refuse_loader();
    if (!options.split && !(*owner)->has_own_sampler()) refuse_divided_loader();
    return std::make_unique<LoaderPasses<Loader>>(std::move(*owner));
  };
}

/// For a torch dataset. `Options` is DataLoaderOptions; a template, since that struct is incomplete in this header.
template <class Dataset, class Options>
MakePasses make_passes_of(Dataset dataset, const Options& given) {
  return [dataset, given](OperatorRegistry& parts, const PassesOptions& options) -> std::unique_ptr<Passes> {
    Options of_loader = given;
    of_loader.training = options.training;
    if (!options.training && of_loader.name == Options{}.name) of_loader.name = "validation_loader";
    auto worker = data::worker_of(session_of(parts));
    if (!options.split) {
      if (const auto global = std::exchange(of_loader.global_batch_size, std::nullopt))
        of_loader.batch_size = *global / static_cast<std::size_t>(worker.world) +
                               (*global % static_cast<std::size_t>(worker.world) != 0 ? 1 : 0);
      worker.rank = 0, worker.world = 1, worker.full_worker_count = 0;
    }
    return std::make_unique<LoaderPasses<DataLoader<Dataset>>>(
        make_loader<DataLoader<Dataset>>(worker, dataset, of_loader));
  };
}

// Components.

template <class T>
struct IsTuple : std::false_type {};
template <class... T>
struct IsTuple<std::tuple<T...>> : std::true_type {};

template <class T>
auto as_tuple(T value) {
  if constexpr (IsTuple<T>::value)
    return value;
  else
    return std::tuple<T>(std::move(value));
}

template <class T>
inline constexpr bool are_optimizers = false;
template <class... T>
inline constexpr bool are_optimizers<std::tuple<T...>> = (std::derived_from<T, torch::optim::Optimizer> && ...);

template <ModuleHolder Holder>
auto module_of(const Holder& holder) {
  return holder.ptr();
}
template <class Module>
std::shared_ptr<Module> module_of(const std::shared_ptr<Module>& module) {
  return module;
}

template <class T>
std::shared_ptr<torch::nn::Module> module_or_null(const T& value) {
  if constexpr (ModuleHolder<T>)
    return value.ptr();
  else
    return {};
}

template <class Module, std::size_t... I>
bool call_forward(Module& module, const std::vector<at::Tensor>& features, at::Tensor& output,
                  std::index_sequence<I...>) {
  if constexpr (requires {
                  { module.forward(features[I]...) } -> std::convertible_to<at::Tensor>;
                }) {
    if (features.size() != sizeof...(I)) return false;
    output = module.forward(features[I]...);
    return true;
  }
  return false;
}

[[noreturn]] MUSTER_API void refuse_features(std::size_t number);

/// Returns a function that calls the model's forward() with one to four tensors.
template <class Model>
Forward forward_of(const Model& model) {
  return [module = module_of(model)](const std::vector<at::Tensor>& features) {
    at::Tensor output;
    const bool called = call_forward(*module, features, output, std::make_index_sequence<1>()) ||
                        call_forward(*module, features, output, std::make_index_sequence<2>()) ||
                        call_forward(*module, features, output, std::make_index_sequence<3>()) ||
                        call_forward(*module, features, output, std::make_index_sequence<4>());
    if (!called) refuse_features(features.size());
    return output;
  };
}

template <class T>
Criterion criterion_of(T criterion) {
  return [criterion](const at::Tensor& output, const at::Tensor& target) mutable -> at::Tensor {
    return criterion(output, target);
  };
}

/// Makes the schedulers: the first maker is called with the first optimizer, and so on.
template <class... Makers, class Optimizers>
auto make_schedulers(const std::tuple<Makers...>& makers, const Optimizers& optimizers) {
  static_assert(sizeof...(Makers) <= std::tuple_size_v<Optimizers>, "There are more schedulers than optimizers.");
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    return std::tuple{[&](const auto& maker, auto& optimizer) {
      using Scheduler = std::decay_t<decltype(maker(optimizer))>;
      return std::shared_ptr<Scheduler>(new Scheduler(maker(optimizer)));
    }(std::get<I>(makers), *std::get<I>(optimizers))...};
  }
  (std::make_index_sequence<sizeof...(Makers)>());
}

}  // namespace detail::operators
}  // namespace muster
