// What a checkpoint holds, by name: models, optimizers, schedulers, tensors, JSON.
//
//   auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"best", best}});   // best: double or Json
//
// A StateEntry refers to the object, so the object must outlive it; a module is held by its shared_ptr.
//
// All ranks save one state, so its parts must be the same on all of them. At each save, before anything is written,
// they are compared by a checksum that every rank takes of every tensor (XXH3; on a GPU by the GPU). That costs about a
// twentieth of the save.
//
// What is your own (tensors, JSON, numbers, strings, functions) and differs in a single bit is an Error
// (ExitCode::user_error) that names it and the ranks; nothing is written then, and the checkpoint before stays.
// per_rank says that each rank has its own. A model, an optimizer or a scheduler may drift apart (after join(), or on
// machines of two kinds): that is a warning with the ranks and the largest difference, and rank 0's are saved.
#pragma once

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

namespace detail::checkpoint {
struct Stateful;
}

/// A module holder, as TORCH_MODULE makes them.
template <class T>
concept ModuleHolder = requires(const T& holder) {
  { holder.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
};

/// Tensors by path ("layer1.0.weight", "momentum_buffer/fc.bias") and JSON: the state of one object, or of a whole
/// checkpoint, whose paths then begin with the entry's name ("model/layer1.0.weight").
struct StateDict {
  std::map<std::string, at::Tensor> tensors = {};
  Json values = Json::object();
};

/// One named object of a state.
class StateEntry {
 public:
  StateEntry(std::shared_ptr<torch::nn::Module> module);
  template <class M>
  requires std::convertible_to<M*, torch::nn::Module*> StateEntry(const std::shared_ptr<M>& module)
      : StateEntry(std::shared_ptr<torch::nn::Module>(module)) {}
  template <ModuleHolder Holder>
  StateEntry(const Holder& holder) : StateEntry(std::shared_ptr<torch::nn::Module>(holder.ptr())) {}
  /// SGD, Adam, AdamW, Adagrad, RMSprop, LBFGS.
  StateEntry(torch::optim::Optimizer& optimizer);
  /// Its number of steps. A class of your own that has more to keep is StateEntry(save, load).
  StateEntry(torch::optim::LRScheduler& scheduler);
  StateEntry(torch::optim::ReduceLROnPlateauScheduler& scheduler);
  /// Restored in place: shape and type must be those saved.
  StateEntry(at::Tensor& tensor);
  StateEntry(Json& value);
  StateEntry(double& value);
  StateEntry(std::int64_t& value);
  StateEntry(std::string& value);
  /// Anything else.
  StateEntry(std::function<StateDict()> save, std::function<void(const StateDict&)> load);

  explicit StateEntry(std::shared_ptr<detail::checkpoint::Stateful> object) : object_(std::move(object)) {}
  const std::shared_ptr<detail::checkpoint::Stateful>& object() const noexcept { return object_; }
  bool is_per_rank() const noexcept { return per_rank_; }

 private:
  friend StateEntry per_rank(StateEntry entry);
  std::shared_ptr<detail::checkpoint::Stateful> object_;
  bool per_rank_ = false;
};

/// An entry of which each rank has its own, such as what its environment or its sampler stands at:
///
///   auto state = session.state({{"model", net}, {"seen", muster::per_rank(seen)}});   // seen: a tensor, a number, …
///
/// Tensors have the same shape and type on every rank, else an Error (ExitCode::user_error). A checkpoint holds them as
/// [world, …], and values as a list. Restored, each rank gets its own back; at another number of ranks it is refused
/// (ExitCode::data) before anything is changed. A save brings all ranks' values to every rank; tensors may be large.
inline StateEntry per_rank(StateEntry entry) {
  entry.per_rank_ = true;
  return entry;
}

using StateEntries = std::vector<std::pair<std::string, StateEntry>>;

}  // namespace muster
