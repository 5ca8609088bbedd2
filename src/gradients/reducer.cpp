#include "gradients/reducer.hpp"

#include "gradients/hooks.hpp"
#include "gradients/sparse_exchange.hpp"
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

namespace muster::detail::gradients {
namespace {

constexpr const char* averaging = "averaging gradients";

// What each flag says.
constexpr Flags stop = 1;

std::string text_of(at::ScalarType type, at::IntArrayRef sizes, c10::Device device) {
  return c10::str(type, sizes, " on ", device);
}

[[noreturn]] void refuse(const std::string& fact) {
  throw Error(ExitCode::data, averaging, fact, "Change the model first, then call prepare_model");
}

[[noreturn]] void refuse_fused() {
  throw Error(ExitCode::usage, "joining ranks with different numbers of batches",
              "an optimizer is fused with the averaging of gradients", "Prepare it with Fuse::never");
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
  std::size_t index = none;  ///< in its exchange
  bool sparse = false;       ///< so is its gradient
  bool chosen = false;       ///< to be exchanged
  bool exchanged() const noexcept { return index != none; }
  bool dense() const noexcept { return exchanged() && !sparse; }

  bool reached = false;  ///< in the pass under way
  bool added = false;    ///< to the exchange, in the last pass that it has begun
  Use use = Use::unused;
  bool fresh = false;    ///< .grad is made by this pass
  bool pending = false;  ///< .grad holds what was added up and not yet averaged
  bool ghost = false;    ///< .grad was made by passes of weight 0 alone

  void check_gradient() const {
    const auto& gradient = tensor.grad();
    if (sparse && gradient.layout() != at::kSparse)
      throw Error(ExitCode::data, averaging,
                  "the gradient of parameter " + name + " is dense, but its embedding sparse",
                  "Use the parameter in that embedding alone, or make it with sparse(false)");
    if (!sparse && gradient.layout() != at::kStrided)
      throw Error(ExitCode::data, averaging, "the gradient of parameter " + name + " is sparse",
                  "Make it dense, or leave it to a torch::nn::Embedding or EmbeddingBag with sparse(true)");
    if (gradient.scalar_type() != type)
      throw Error(ExitCode::data, averaging,
                  c10::str("the gradient of parameter ", name, " is ", gradient.scalar_type(), ", not ", type),
                  "Keep gradients in the type of their parameter");
  }
  bool changed() const {
    return tensor.sizes() != at::IntArrayRef(sizes) || tensor.scalar_type() != type || tensor.device() != device;
  }
};

struct Reducer::Pass {
  std::weak_ptr<Reducer> reducer;
  bool averages = true;
  bool postponed = false;   ///< its gradients are exchanged when backward() has ended
  std::size_t missing = 0;  ///< gradients that the exchange is still to be given

  ~Pass() {
    if (const auto alive = reducer.lock()) alive->take_own_memory();
  }
};

/// The reducers that have a pass in this thread's backward() and have everything for it.
std::shared_ptr<Reducer::Complete> Reducer::complete_in_this_backward() {
  static thread_local std::weak_ptr<Complete> current;
  auto complete = current.lock();
  if (!complete) current = complete = std::make_shared<Complete>();
  return complete;
}

Reducer::Reducer(std::shared_ptr<torch::nn::Module> module, int total, MakeExchange make_dense,
                 MakeExchange make_sparse, std::shared_ptr<const step::Steps> steps,
                 std::shared_ptr<const int> no_sync_depth)
    : order_(++made),
      module_(std::move(module)),
      total_(total),
      steps_(std::move(steps)),
      no_sync_depth_(std::move(no_sync_depth)),
      make_dense_(std::move(make_dense)),
      make_sparse_(std::move(make_sparse)) {
  const auto sparse = sparse_parameters(*module_);
  std::set<const void*> seen;  // parameters() lists a shared tensor under each of its names
  for (const auto& item : module_->named_parameters()) {
    const auto& tensor = item.value();
    names_.emplace_back(item.key(), tensor.unsafeGetTensorImpl());
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (!at::isFloatingType(tensor.scalar_type()) && !at::isComplexType(tensor.scalar_type())) continue;
    parameters_.push_back({item.key(), tensor, tensor.sizes().vec(), tensor.scalar_type(), tensor.device()});
    parameters_.back().sparse = sparse.contains(tensor.unsafeGetTensorImpl());
  }
  for (const auto i : unfrozen()) parameters_[i].chosen = true;
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

/// Those that were to be trained in some pass.
void Reducer::choose_parameters() {
  std::vector<at::Tensor> dense, sparse;
  for (auto& p : parameters_) {
    if (!p.chosen) continue;
    auto& tensors = p.sparse ? sparse : dense;
    p.index = tensors.size();
    tensors.push_back(p.tensor);
  }
  dense_ = make_dense_(dense);
  if (!sparse.empty()) sparse_ = make_sparse_(sparse);
}

std::vector<std::size_t> Reducer::unfrozen() const {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (!parameters_[i].exchanged() && parameters_[i].tensor.requires_grad()) found.push_back(i);
  return found;
}

/// What a pass has found unfrozen when it began: a rank may come to finish it when much is frozen or not again.
void Reducer::take_in(const std::vector<std::size_t>& unfrozen) {
  bool any = false;
  for (const auto i : unfrozen) any |= !std::exchange(parameters_[i].chosen, true);
  if (any) choose_parameters();
}

Exchange& Reducer::exchange_of(const Parameter& parameter) const noexcept {
  return parameter.sparse ? *sparse_ : *dense_;
}

std::vector<at::Tensor> Reducer::exchanged() const {
  std::vector<at::Tensor> tensors;
  for (const auto& p : parameters_)
    if (p.dense()) tensors.push_back(p.tensor);
  return tensors;
}

void Reducer::join(Communicator channel, bool over_all) {
  if (deferred_) refuse_fused();
  joined_.emplace(Joined{std::move(channel), over_all});
}

std::int64_t Reducer::part() {
  const auto passes = joined_ ? joined_->passes : 0;
  joined_.reset();
  return passes;
}

std::int64_t Reducer::Joined::agree(bool active_here) {
  passes += active_here;
  active = channel.all_reduce(std::int64_t{active_here});
  return active;
}

bool Reducer::shadow() {
  cut_off();
  drain();
  if (joined_->agree(false) == 0) return false;
  dense_->begin(Arrival::at_once, flags());
  if (sparse_) sparse_->begin(Arrival::at_once, flags());
  for (const auto& p : parameters_)
    if (p.exchanged()) exchange_of(p).add(p.index, {}, Use::unused);
  dense_->finish();
  if (sparse_) sparse_->finish();
  count(dense_->flags() | (sparse_ ? sparse_->flags() : 0));
  for (const auto& p : parameters_)
    if (p.exchanged()) users(p);
  return true;
}

at::Tensor Reducer::weigh(std::size_t parameter, const at::Tensor& gradient) {
  auto& p = parameters_[parameter];
  if (!accumulates(p.tensor)) return gradient;
  const double weight = steps_->weight();
  p.fresh = !p.tensor.grad().defined();
  if (p.fresh) {
    // Whatever was there before has been thrown away.
    p.pending = false;
    p.ghost = weight <= 0.0;
  }
  // A view would keep its base, and so look like memory that others have too.
  if (weight == 1.0) return gradient.is_view() && !at::GradMode::is_enabled() ? gradient.detach() : gradient;
  if (weight > 0.0) return gradient * weight;
  return at::zeros_like(gradient);  // a ghost's loss may be NaN, which 0 does not mend
}

void Reducer::accumulated(std::size_t parameter) {
  auto pass = pass_.lock();
  if (!pass) pass = begin();
  auto& p = parameters_[parameter];
  p.check_gradient();
  if (p.reached)
    throw Error(ExitCode::data, averaging, "parameter " + p.name + " was given a gradient twice in one backward()",
                "Do not run backward() inside backward()");
  if (std::exchange(p.fresh, false) && others_have_memory_of(p.tensor.grad())) {
    const at::NoGradGuard no_grad;
    p.tensor.mutable_grad() = p.tensor.grad().clone();
  }

  const bool counts = steps_->weight() > 0.0;
  if (counts) p.ghost = false;
  if (!pass->averages) {
    p.pending |= counts;
    return;
  }
  p.reached = true;
  p.use = counts || p.pending ? Use::used : Use::unused;
  // The last one is added when backward() has ended: until then the other ranks can be told of an exception.
  if (in_backward(p) && !pass->postponed && --pass->missing > 0) add(p);
}

/// Waits for nobody: the models of one backward() may begin in another order on each rank.
std::shared_ptr<Reducer::Pass> Reducer::begin() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  check_parameters();
  cut_off();
  if (joined_) {
    drain();  // there is no other model
    if (!unfrozen().empty())
      throw Error(ExitCode::user_error, averaging, "a parameter was unfrozen inside join()",
                  "Unfreeze it before, when all ranks have batches");
    if (deferred_) refuse_fused();
  }
  if (waiting_ && !deferred_) {
    // The optimizer has gone, and has left this rank's own gradients.
    open_ = waiting_ = false;
    for (auto& p : parameters_) p.pending |= p.dense() && p.tensor.grad().defined() && !p.ghost;
  }
  for (auto& p : parameters_) {
    p.reached = false;
    p.use = Use::unused;
  }

  before_ = sample();
  const auto pass = std::make_shared<Pass>();
  pass->reducer = weak_from_this();
  pass->averages = *no_sync_depth_ == 0;
  pass_ = pass;
  if (!pass->averages) return pass;
  if (joined_) joined_->agree(true);
  open_ = true;
  waiting_ = false;
  unfrozen_ = unfrozen();
  pass->postponed = !owed_.empty() || !unfrozen_.empty();
  if (!pass->postponed) begin_exchanges(Arrival::in_backward);
  for (const auto& p : parameters_) pass->missing += in_backward(p);
  at_end_of_backward([weak = weak_from_this(), pass, complete = complete_in_this_backward()] {
    const auto self = weak.lock();
    if (!self) return;
    if (!pass->postponed) self->add_rest();
    complete->emplace_back(self, pass);
    // After the rest of every other model in this backward(), which may come in another order on another rank.
    at_end_of_backward([complete] { finish_all(*complete); });
  });
  return pass;
}

/// In the order that all ranks share: finishing may be more than one message.
void Reducer::finish_all(Complete& complete) {
  auto all = std::exchange(complete, {});
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first->order_ < b.first->order_; });
  for (const auto& [reducer, pass] : all) reducer->finish(*pass);
}

Flags Reducer::flags() const { return wishes_to_stop_ && wishes_to_stop_() ? stop : 0; }

/// A pass has been averaged.
void Reducer::count(Flags flags) {
  ++passes_;
  stop_wished_ = (flags & stop) != 0;
}

void Reducer::begin_exchanges(Arrival arrival) {
  begun_ = true;
  dense_begun_ = !deferred_;
  if (dense_begun_) dense_->begin(arrival, flags());
  if (sparse_) sparse_->begin(arrival, flags());
  for (auto& p : parameters_) p.added = false;
}

bool Reducer::in_backward(const Parameter& parameter) const noexcept {
  return parameter.exchanged() && (parameter.sparse || !deferred_);
}

void Reducer::add(Parameter& parameter) {
  parameter.added = true;
  exchange_of(parameter).add(parameter.index, parameter.tensor.grad(), parameter.use);
}

/// What this pass did not reach gives what an earlier one has left in .grad, which is the same on all ranks unless it
/// is pending.
void Reducer::add_rest() {
  for (auto& p : parameters_) {
    if (!in_backward(p) || p.added) continue;
    if (!p.reached && p.tensor.grad().defined()) {
      p.check_gradient();
      if (p.pending) p.use = Use::used;
    }
    add(p);
  }
}

void Reducer::finish(Pass& pass) {
  if (pass.postponed) {
    drain();
    take_in(unfrozen_);
    begin_exchanges(Arrival::at_once);
    add_rest();
  }
  begun_ = false;
  waiting_ = open_ = deferred_;
  // The thread of the dense ones may use the process group until they are finished.
  if (!deferred_) dense_->finish();
  if (sparse_) sparse_->finish();
  const bool complete = deferred_ || dense_->complete();
  if (complete && !deferred_) count(dense_->flags() | (sparse_ ? sparse_->flags() : 0));
  for (auto& p : parameters_) {
    if (!in_backward(p)) continue;
    if (complete)
      store(p, true);
    else
      put_aside(p);
  }
}

/// The exchange has it; the next pass begins afresh, and an optimizer has nothing to step with.
void Reducer::put_aside(Parameter& parameter) {
  parameter.tensor.mutable_grad().reset();
  parameter.pending = parameter.ghost = false;
}

/// On how many ranks this pass has used the parameter.
int Reducer::users(const Parameter& parameter) const {
  const int users = exchange_of(parameter).users(parameter.index);
  if (users < 0)
    throw Error(ExitCode::user_error, averaging, "another rank has left this backward() by an exception and gone on",
                "Let the exception end the training function");
  return users;
}

/// What is left when a gradient has been averaged, or used by the optimizer.
void Reducer::store(Parameter& parameter, bool fetch) {
  const int ranks = users(parameter);
  auto& gradient = parameter.tensor.mutable_grad();
  if (ranks > 0 && fetch) {
    exchange_of(parameter).fetch(parameter.index, gradient);
    if (joined_ && !joined_->over_all && joined_->active < total_) {
      const at::NoGradGuard no_grad;
      gradient.mul_(static_cast<double>(total_) / static_cast<double>(joined_->active));
    }
  } else if (ranks == 0 && parameter.ghost) {
    gradient.reset();
  }
  parameter.pending = parameter.ghost = false;
}

void Reducer::gather() {
  if (!waiting_) {
    // No pass has been since the last step: .grad is what somebody has put there.
    cut_off();
    drain();
    check_parameters();
  }
  dense_->begin(Arrival::at_once, flags());
  // As torch's optimizers do, it steps with the gradients that are there.
  for (const auto& p : parameters_)
    if (p.dense())
      dense_->add(p.index, p.tensor.grad(), p.tensor.grad().defined() && !p.ghost ? Use::used : Use::unused);
}

void Reducer::close() {
  open_ = waiting_ = false;
  count(dense_->flags());
  for (auto& p : parameters_)
    if (p.dense()) store(p, false);
}

void Reducer::settle() {
  if (!waiting_) return;
  gather();
  open_ = waiting_ = false;
  dense_->finish();
  count(dense_->flags());
  for (auto& p : parameters_)
    if (p.dense()) store(p, true);
}

/// An exception has cut a pass off: the exchange goes on with the gradients that it was given, so .grad gets memory of
/// its own, to which anything may be written.
void Reducer::take_own_memory() noexcept {
  if (!open_ || waiting_ || !begun_ || !dense_begun_ || !owed_.empty()) return;
  for (auto& p : parameters_) {
    auto& gradient = p.tensor.mutable_grad();
    if (!p.dense() || !p.added || !gradient.defined()) continue;
    try {
      const at::NoGradGuard no_grad;
      gradient.set_data(gradient.clone());
    } catch (const std::exception&) {
      gradient.reset();
    }
  }
}

/// If an exception has cut the last pass off, tells the other ranks, which hear it when the pass is finished.
void Reducer::cut_off() {
  if (!open_ || waiting_) return;
  open_ = false;
  owed_.push_back(std::move(unfrozen_));
  if (owed_.size() == 1 && begun_) leave();
}

void Reducer::recover() {
  cut_off();
  drain();
}

Sample Reducer::sample() const {
  std::vector<at::Tensor> trained;
  for (auto p = parameters_.rbegin(); p != parameters_.rend() && trained.size() < Sample::most_tensors; ++p)
    if (p->tensor.requires_grad()) trained.push_back(p->tensor);
  return Sample(trained);
}

bool Reducer::spent() const {
  const bool none = std::none_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) {
    return p.tensor.grad().defined() && has_values(p.tensor.grad());
  });
  return none || !before_ || (!waiting_ && !(sample() == *before_));
}

void Reducer::leave() {
  for (auto& p : parameters_)
    if (p.exchanged() && !p.added && (p.sparse || dense_begun_)) exchange_of(p).add(p.index, {}, Use::abandoned);
}

/// Finishes the passes that exceptions have cut off. Collective.
void Reducer::drain() {
  for (const auto& unfrozen : std::exchange(owed_, {})) {
    if (!std::exchange(begun_, false)) {
      take_in(unfrozen);
      begin_exchanges(Arrival::at_once);
      begun_ = false;
      leave();
    }
    if (dense_begun_) dense_->finish();
    if (sparse_) sparse_->finish();
    if (!dense_begun_) {
      // Those who were not cut off come to this in the optimizer's step.
      dense_->begin(Arrival::at_once, flags());
      for (const auto& p : parameters_)
        if (p.dense()) dense_->add(p.index, {}, Use::abandoned);
      dense_->finish();
    }
  }
}

}  // namespace muster::detail::gradients
