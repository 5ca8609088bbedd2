#include "model/reducer.hpp"

#include "model/hooks.hpp"
#include "muster/error.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>

namespace muster::model {
namespace {

constexpr const char* averaging = "averaging gradients";

std::string text_of(at::ScalarType type, at::IntArrayRef sizes, c10::Device device) {
  return c10::str(type, sizes, " on ", device);
}

[[noreturn]] void refuse(const std::string& fact) {
  throw Error(ExitCode::data, averaging, fact, "Change the model first, then call prepare_model");
}

std::atomic<int> made{0};

}  // namespace

struct Reducer::Parameter {
  std::string name;
  at::Tensor tensor;
  // As it was when it was prepared.
  std::vector<std::int64_t> sizes;
  at::ScalarType type;
  c10::Device device;

  static constexpr std::size_t none = ~std::size_t{0};
  std::size_t index = none;  ///< in the exchange

  bool reached = false;  ///< in the pass under way
  Use use = Use::none;
  bool pending = false;  ///< .grad holds what was added up and not yet averaged
  bool ghost = false;    ///< .grad was made by passes of weight 0 alone

  bool changed() const {
    return tensor.sizes() != at::IntArrayRef(sizes) || tensor.scalar_type() != type || tensor.device() != device;
  }
};

struct Reducer::Pass {
  bool averages = true;
};

namespace {

/// The reducers that have a pass in this thread's backward() and have everything for it.
using Complete = std::vector<std::shared_ptr<Reducer>>;

std::shared_ptr<Complete> complete_in_this_backward() {
  static thread_local std::weak_ptr<Complete> current;
  auto complete = current.lock();
  if (!complete) current = complete = std::make_shared<Complete>();
  return complete;
}

}  // namespace

Reducer::Reducer(std::shared_ptr<torch::nn::Module> module, int world, MakeExchange make_exchange,
                 std::shared_ptr<const data::StepWeight> weight, std::shared_ptr<const int> no_sync_depth)
    : order_(++made),
      module_(std::move(module)),
      world_(world),
      make_exchange_(std::move(make_exchange)),
      weight_(std::move(weight)),
      no_sync_depth_(std::move(no_sync_depth)) {
  std::set<const void*> seen;  // parameters() lists a shared tensor under each of its names
  for (const auto& item : module_->named_parameters()) {
    const auto& tensor = item.value();
    names_.emplace_back(item.key(), tensor.unsafeGetTensorImpl());
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (!at::isFloatingType(tensor.scalar_type()) && !at::isComplexType(tensor.scalar_type())) continue;
    parameters_.push_back({item.key(), tensor, tensor.sizes().vec(), tensor.scalar_type(), tensor.device()});
  }
  choose_parameters();
}

Reducer::~Reducer() = default;

void Reducer::install() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) install_hooks(parameters_[i].tensor, weak_from_this(), i);
}

void Reducer::check_parameters() const {
  const auto now = module_->named_parameters();
  for (const auto& [name, tensor] : names_) {
    const auto* found = now.find(name);
    if (!found) refuse("parameter " + name + " was removed from the model after prepare_model");
    if (found->unsafeGetTensorImpl() != tensor) refuse("parameter " + name + " was replaced after prepare_model");
  }
  if (now.size() != names_.size())
    for (const auto& item : now)
      if (std::none_of(names_.begin(), names_.end(), [&](const auto& known) { return known.first == item.key(); }))
        refuse("parameter " + item.key() + " was added to the model after prepare_model");
  for (const auto& p : parameters_)
    if (p.changed())
      refuse("parameter " + p.name + " was " + text_of(p.type, p.sizes, p.device) + " in prepare_model and is " +
             text_of(p.tensor.scalar_type(), p.tensor.sizes(), p.tensor.device()) + " now");
}

/// Those that are or once were to be trained.
void Reducer::choose_parameters() {
  exchanged_.clear();
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& p = parameters_[i];
    if (!p.tensor.requires_grad() && p.index == Parameter::none) continue;
    p.index = exchanged_.size();
    exchanged_.push_back(i);
    tensors.push_back(p.tensor);
  }
  exchange_ = make_exchange_(tensors);
  ++generation_;
}

at::Tensor Reducer::weigh(std::size_t parameter, const at::Tensor& gradient) {
  const double weight = weight_->relative(world_);
  auto& p = parameters_[parameter];
  if (weight == 1.0 || !accumulates(p.tensor)) return gradient;
  if (weight > 0.0) return gradient * weight;
  if (!p.tensor.grad().defined()) p.ghost = true;
  return at::zeros_like(gradient);  // a ghost's loss may be NaN, which 0 does not mend
}

void Reducer::accumulated(std::size_t parameter) {
  auto pass = pass_.lock();
  if (!pass) pass = begin();
  auto& p = parameters_[parameter];
  const auto& gradient = p.tensor.grad();
  if (gradient.layout() != at::kStrided)
    throw Error(ExitCode::data, averaging, "the gradient of parameter " + p.name + " is sparse",
                "Make it dense, for an embedding with sparse(false)");
  if (gradient.scalar_type() != p.type)
    throw Error(ExitCode::data, averaging,
                c10::str("the gradient of parameter ", p.name, " is ", gradient.scalar_type(), ", not ", p.type),
                "Keep gradients in the type of their parameter");
  if (p.reached)
    throw Error(ExitCode::data, averaging, "parameter " + p.name + " was given a gradient twice in one backward()",
                "Do not run backward() inside backward()");

  const bool counts = weight_->relative(world_) > 0.0;
  if (counts) p.ghost = false;
  if (!pass->averages) {
    p.pending |= counts;
    return;
  }
  p.reached = true;
  p.use = counts || p.pending ? Use::used : Use::none;
  if (!deferred_) exchange_->add(p.index, gradient, p.use);
}

std::shared_ptr<Reducer::Pass> Reducer::begin() {
  drain();
  check_parameters();
  if (std::any_of(parameters_.begin(), parameters_.end(),
                  [](const Parameter& p) { return p.index == Parameter::none && p.tensor.requires_grad(); }))
    choose_parameters();
  for (auto& p : parameters_) {
    p.reached = false;
    p.use = Use::none;
  }

  const auto pass = std::make_shared<Pass>(Pass{*no_sync_depth_ == 0});
  pass_ = pass;
  open_ = pass->averages;
  if (open_ && !deferred_) exchange_->begin();
  at_end_of_backward([weak = weak_from_this(), pass, complete = complete_in_this_backward()] {
    const auto self = weak.lock();
    if (!self || !pass->averages) return;
    self->add_rest();
    complete->push_back(self);
    // After the rest of every other model in this backward(), which may come in another order on another rank.
    at_end_of_backward([pass, complete] { finish_all(*complete); });
  });
  return pass;
}

/// In the order that all ranks share: finishing may be more than one message.
void Reducer::finish_all(std::vector<std::shared_ptr<Reducer>>& complete) {
  auto reducers = std::exchange(complete, {});
  std::sort(reducers.begin(), reducers.end(), [](const auto& a, const auto& b) { return a->order_ < b->order_; });
  for (const auto& reducer : reducers) reducer->finish();
}

/// What this pass did not reach gives what an earlier one has left in .grad, which is the same on all ranks unless it
/// is pending.
void Reducer::add_rest() {
  for (const auto i : exchanged_) {
    auto& p = parameters_[i];
    if (p.reached) continue;
    // An optimizer that averages by itself steps with what an earlier pass has averaged.
    if ((p.pending || (deferred_ && !p.ghost)) && p.tensor.grad().defined()) p.use = Use::used;
    if (!deferred_) exchange_->add(p.index, p.tensor.grad(), p.use);
  }
}

void Reducer::finish() {
  if (deferred_) {
    waiting_ = true;
    return;
  }
  open_ = false;
  exchange_->finish();
  for (const auto i : exchanged_) store(parameters_[i], true);
}

/// What is left when a gradient has been averaged, or used by the optimizer.
void Reducer::store(Parameter& parameter, bool fetch) {
  const int users = exchange_->users(parameter.index);
  if (users < 0)
    throw Error(ExitCode::user_error, averaging, "another rank has left this backward() by an exception and gone on",
                "Let the exception end the training function");
  auto& gradient = parameter.tensor.mutable_grad();
  if (users > 0 && fetch)
    exchange_->fetch(parameter.index, gradient);
  else if (users == 0 && parameter.ghost)
    gradient.reset();
  parameter.pending = parameter.ghost = false;
}

std::vector<at::Tensor> Reducer::exchanged() const {
  std::vector<at::Tensor> tensors;
  for (const auto i : exchanged_) tensors.push_back(parameters_[i].tensor);
  return tensors;
}

void Reducer::gather() {
  if (!waiting_) {
    // No pass has been since the last step: .grad is what somebody has put there.
    drain();
    check_parameters();
    for (const auto i : exchanged_) {
      auto& p = parameters_[i];
      p.use = p.tensor.grad().defined() ? Use::used : Use::none;
    }
  }
  exchange_->begin();
  for (const auto i : exchanged_)
    exchange_->add(parameters_[i].index, parameters_[i].tensor.grad(), parameters_[i].use);
}

void Reducer::close() {
  open_ = waiting_ = false;
  for (const auto i : exchanged_) store(parameters_[i], false);
}

void Reducer::settle() {
  if (!waiting_) return;
  gather();
  exchange_->finish();
  open_ = waiting_ = false;
  for (const auto i : exchanged_) store(parameters_[i], true);
}

/// Ends a pass that no optimizer has taken, or that an exception has cut off: the other ranks may wait for it.
void Reducer::drain() {
  settle();
  if (!open_) return;
  if (deferred_) exchange_->begin();
  for (const auto i : exchanged_)
    if (deferred_ || !parameters_[i].reached) exchange_->add(parameters_[i].index, {}, Use::left);
  exchange_->finish();
  open_ = false;
}

}  // namespace muster::model
