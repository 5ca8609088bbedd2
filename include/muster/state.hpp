// What a checkpoint holds, by name: models, optimizers, schedulers, tensors, JSON.
//
//   auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"best", best}});   // best: double or Config
//
// A StateEntry refers to the object, so the object must outlive it; a module is held by its shared_ptr.
#pragma once

#include <muster/config.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
class LRScheduler;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

namespace muster {

/// Tensors by path ("layer1.0.weight", "momentum_buffer/fc.bias") and JSON: the state of one object, or of a whole
/// checkpoint, whose paths then begin with the entry's name ("model/layer1.0.weight").
struct StateDict {
  std::map<std::string, at::Tensor> tensors = {};
  Config values = Config::object();
};

/// One named object of a state.
class StateEntry {
 public:
  StateEntry(std::shared_ptr<torch::nn::Module> module);
  template <class M>
  requires std::convertible_to<M*, torch::nn::Module*> StateEntry(const std::shared_ptr<M>& module)
      : StateEntry(std::shared_ptr<torch::nn::Module>(module)) {}
  /// A module holder, as TORCH_MODULE makes them.
  template <class Holder>
  requires requires(const Holder& holder) {
    { holder.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
  }
  StateEntry(const Holder& holder) : StateEntry(std::shared_ptr<torch::nn::Module>(holder.ptr())) {}
  /// SGD, Adam, AdamW, Adagrad, RMSprop, LBFGS.
  StateEntry(torch::optim::Optimizer& optimizer);
  StateEntry(torch::optim::LRScheduler& scheduler);
  StateEntry(torch::optim::ReduceLROnPlateauScheduler& scheduler);
  /// Restored in place: shape and type must be those saved.
  StateEntry(at::Tensor& tensor);
  StateEntry(Config& value);
  StateEntry(double& value);
  StateEntry(std::int64_t& value);
  StateEntry(std::string& value);
  /// Anything else.
  StateEntry(std::function<StateDict()> save, std::function<void(const StateDict&)> load);

  struct Object;
  const std::shared_ptr<Object>& object() const noexcept { return object_; }

 private:
  std::shared_ptr<Object> object_;
};

using StateEntries = std::vector<std::pair<std::string, StateEntry>>;

}  // namespace muster
