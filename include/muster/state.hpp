// The contents of a checkpoint, by name: models, optimizers, schedulers, tensors, JSON.
//
//   auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"best", best}});   // best: double or Json
//
// A StateEntry refers to its object, which must outlive it. It shares the ownership of a module.
//
// All ranks save one common state, so its parts must be the same on all of them. At each save, before the checkpoint is
// complete, they are compared: every rank computes a fingerprint of every tensor (on the CPU its CRC-64, on a GPU a sum
// that the GPU computes). This takes about a twentieth of the save's time.
//
// If your own values (tensors, JSON, numbers, strings, functions) differ in a single bit, this is an Error
// (ExitCode::user_error) that names the value and the ranks; no checkpoint is made, and the previous one stays. Use
// per_rank() for values of which each rank has its own; a Mean and the metrics of classification.hpp need none. Models,
// optimizers and schedulers may drift apart (after join(), or on machines of two kinds): this is a warning with the
// ranks and the largest difference, and rank 0's values are saved.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/json.hpp>

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

namespace detail::state {
struct Stateful;
}

/// A module holder, as made by TORCH_MODULE.
template <class T>
concept ModuleHolder = requires(const T& holder) {
  { holder.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
};

/// Tensors by path ("layer1.0.weight", "momentum_buffer/fc.bias"), and JSON values. The state of one object, or of a
/// whole checkpoint, whose paths then begin with the entry's name ("model/layer1.0.weight").
struct StateDict {
  std::map<std::string, at::Tensor> tensors = {};
  Json values = Json::object();
};

/// One object of a state; its name stands beside it in StateEntries.
class MUSTER_API StateEntry {
 public:
  StateEntry(std::shared_ptr<torch::nn::Module> module);
  template <class M>
  requires std::convertible_to<M*, torch::nn::Module*> StateEntry(const std::shared_ptr<M>& module)
      : StateEntry(std::shared_ptr<torch::nn::Module>(module)) {}
  template <ModuleHolder Holder>
  StateEntry(const Holder& holder) : StateEntry(std::shared_ptr<torch::nn::Module>(holder.ptr())) {}
  /// SGD, Adam, AdamW, Adagrad, RMSprop or LBFGS; any other type is an Error (ExitCode::usage).
  StateEntry(torch::optim::Optimizer& optimizer);
  /// Saves the scheduler's number of steps. If your own class has more to save, use StateEntry(save, load).
  StateEntry(torch::optim::LRScheduler& scheduler);
  StateEntry(torch::optim::ReduceLROnPlateauScheduler& scheduler);
  /// Restored in place: the tensor must have the shape and type that were saved.
  StateEntry(at::Tensor& tensor);
  StateEntry(Json& value);
  StateEntry(double& value);
  StateEntry(std::int64_t& value);
  StateEntry(std::string& value);
  /// Anything else: `save` returns its state, and `load` restores it.
  StateEntry(std::function<StateDict()> save, std::function<void(const StateDict&)> load);

  explicit StateEntry(std::shared_ptr<detail::state::Stateful> object) : object_(std::move(object)) {}
  const std::shared_ptr<detail::state::Stateful>& object() const noexcept { return object_; }
  bool is_per_rank() const noexcept { return per_rank_; }

 private:
  friend StateEntry per_rank(StateEntry entry);
  std::shared_ptr<detail::state::Stateful> object_;
  bool per_rank_ = false;
};

/// An entry of which each rank has its own value, such as the state of its environment or its sampler:
///
///   auto state = session.state({{"model", net}, {"seen", muster::per_rank(seen)}});   // seen: a tensor, a number, …
///
/// A tensor must have the same shape and type on every rank, otherwise it is an Error (ExitCode::user_error). A
/// checkpoint has a tensor as [world, …], and other values as a list. When restored, each rank gets its own value back;
/// at another number of ranks the entry is refused (ExitCode::data) before anything is changed. A save sends all ranks'
/// JSON values to every rank; only tensors should be large.
inline StateEntry per_rank(StateEntry entry) {
  entry.per_rank_ = true;
  return entry;
}

using StateEntries = std::vector<std::pair<std::string, StateEntry>>;

}  // namespace muster
