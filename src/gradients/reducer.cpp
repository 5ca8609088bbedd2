#include "gradients/reducer.hpp"

#include "gradients/data_parallel.hpp"
#include "gradients/hooks.hpp"
#include "gradients/reducer_parameter.hpp"
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
#include <string_view>
#include <utility>

namespace muster::detail::gradients {
namespace {

constexpr std::int64_t few = 4096;         ///< elements that are looked at in no time: biases and the like
constexpr std::size_t most_looked_at = 8;  ///< parameters of which a few elements are, in every pass

[[noreturn]] void refuse(const std::string& fact) {
  throw Error(ExitCode::data, averaging, fact, "Change the model first, then call prepare_model");
}

std::atomic<int> made{0};

}  // namespace

struct Reducer::Pass {
  std::weak_ptr<Reducer> reducer;
  bool averages = true;     ///< false in no_sync(): gradients are only accumulated
  std::size_t missing = 0;  ///< number of gradients that the exchanges have not been given yet

  ~Pass() {
    if (const auto alive = reducer.lock()) alive->take_own_memory();
  }
};

void Reducer::Parameter::check_gradient() const {
  const auto& gradient = tensor.grad();
  if (sparse && gradient.layout() != at::kSparse)
    throw Error(ExitCode::data, averaging, "the gradient of parameter " + name + " is dense, but its embedding sparse",
                "Use the parameter in that embedding alone, or make it with sparse(false)");
  if (!sparse && gradient.layout() != at::kStrided)
    throw Error(ExitCode::data, averaging, "the gradient of parameter " + name + " is sparse",
                "Make it dense, or leave it to a torch::nn::Embedding or EmbeddingBag with sparse(true)");
  if (gradient.scalar_type() != type)
    throw Error(ExitCode::data, averaging,
                c10::str("the gradient of parameter ", name, " is ", gradient.scalar_type(), ", not ", type),
                "Keep gradients in the type of their parameter");
  if (gradient.sizes() != at::IntArrayRef(sizes))
    throw Error(
        ExitCode::data, averaging,
        c10::str("the gradient of parameter ", name, " is ", gradient.sizes(), ", not ", at::IntArrayRef(sizes)),
        "Keep gradients in the shape of their parameter");
}

Reducer::Reducer(std::shared_ptr<torch::nn::Module> module, const ParallelContext& context, MakeExchange make_dense,
                 MakeExchange make_sparse)
    : order_(++made),
      module_(std::move(module)),
      steps_(context.steps),
      no_sync_depth_(context.no_sync_depth),
      stop_requested_(context.stop_requested),
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
  extend_exchanges(unfrozen());
}

Reducer::~Reducer() = default;

void Reducer::install() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    install_hooks(parameters_[i].tensor, weak_from_this(), i);
    parameters_[i].hook = hook_of(parameters_[i].tensor);
  }
}

void Reducer::check_parameters() const {
  const auto now = module_->named_parameters();
  for (const auto& [name, tensor] : names_) {
    const auto* found = now.find(name);
    if (!found) refuse("parameter " + name + " was removed from the model after prepare_model");
    if (found->unsafeGetTensorImpl() != tensor) refuse("parameter " + name + " was replaced after prepare_model");
  }
  if (now.size() != names_.size()) {
    std::set<std::string_view> known;
    for (const auto& [name, tensor] : names_) known.insert(name);
    for (const auto& item : now)
      if (!known.contains(item.key()))
        refuse("parameter " + item.key() + " was added to the model after prepare_model");
  }
  for (const auto& p : parameters_) {
    if (hook_of(p.tensor) != p.hook)
      throw Error(ExitCode::data, averaging,
                  "parameter " + p.name + " was given a post-accumulate-gradient hook after prepare_model",
                  "Leave that hook to muster");
  }
  check_shapes();
}

void Reducer::check_shapes() const {
  for (const auto& p : parameters_)
    if (p.changed())
      refuse(c10::str("parameter ", p.name, " was ", p.type, at::IntArrayRef(p.sizes), " on ", p.device,
                      " in prepare_model and is ", p.tensor.scalar_type(), p.tensor.sizes(), " on ", p.tensor.device(),
                      " now"));
}

std::vector<std::size_t> Reducer::unfrozen() const {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (!parameters_[i].exchanged() && parameters_[i].tensor.requires_grad()) found.push_back(i);
  return found;
}

/// `unfrozen`: the parameters that a pass found unfrozen when it began. Parameters may have been frozen or unfrozen
/// again by the time this rank finishes that pass.
void Reducer::extend_exchanges(const std::vector<std::size_t>& unfrozen) {
  bool extends = !dense_;
  for (const auto i : unfrozen) extends |= !parameters_[i].exchanged();
  if (!extends) return;
  for (const auto i : unfrozen) parameters_[i].index = 0;
  std::vector<at::Tensor> dense, sparse;
  for (auto& p : parameters_) {
    if (!p.exchanged()) continue;
    auto& tensors = p.sparse ? sparse : dense;
    p.index = tensors.size();
    tensors.push_back(p.tensor);
  }
  dense_ = make_dense_(dense);
  if (!sparse.empty()) sparse_ = make_sparse_(sparse);
}

Exchange& Reducer::exchange_of(const Parameter& parameter) const noexcept {
  return parameter.sparse ? *sparse_ : *dense_;
}

std::vector<at::Tensor> Reducer::dense_parameters() const {
  std::vector<at::Tensor> tensors;
  for (const auto& p : parameters_)
    if (p.dense()) tensors.push_back(p.tensor);
  return tensors;
}

at::Tensor Reducer::before_accumulation(std::size_t parameter, const at::Tensor& gradient) {
  auto& p = parameters_[parameter];
  if (!accumulates(p.tensor)) return gradient;
  note_change(p);
  p.mark.reset();
  const double weight = steps_->weight();
  if (pass_.expired()) begin_pass();
  p.fresh = !p.tensor.grad().defined();
  if (p.fresh) {
    // Any earlier gradient has been discarded.
    p.pending = false;
    p.padding = weight <= 0.0;
    p.averaged_before.reset();
  } else {
    keep_average(p);
  }
  // A view shares its memory with its base, so others_have_memory_of() would be true for it.
  if (weight == 1.0) return gradient.is_view() && !at::GradMode::is_enabled() ? gradient.detach() : gradient;
  if (weight > 0.0) return gradient * weight;
  return at::zeros_like(gradient);  // the loss of padding may be NaN, and 0 * NaN is NaN
}

void Reducer::after_accumulation(std::size_t parameter) {
  auto pass = pass_.lock();
  if (!pass) pass = begin_pass();  // a backward() inside this one has ended the outer pass
  auto& p = parameters_[parameter];
  p.check_gradient();
  p.waits = true;
  if (p.reached)
    throw Error(ExitCode::data, averaging, "parameter " + p.name + " was given a gradient twice in one backward()",
                "Do not run backward() inside backward()");
  if (std::exchange(p.fresh, false) && others_have_memory_of(p.tensor.grad())) {
    const at::NoGradGuard no_grad;
    p.tensor.mutable_grad() = p.tensor.grad().clone();
  }

  if (watches_numbers_ && p.tensor.numel() <= few && p.tensor.is_cpu()) look_at(p);
  const bool counts = steps_->weight() > 0.0;
  if (counts) p.padding = false;
  if (!pass->averages) {
    p.pending |= counts;
    return;
  }
  p.reached = true;
  p.use = counts || p.pending ? Use::used : Use::unused;
  // The last one is added when backward() has ended: until then the other ranks can be told of an exception.
  if (state_ == State::collecting && in_backward(p) && --pass->missing > 0) add(p);
}

void Reducer::keep_average(Parameter& parameter) const {
  if (!keeps_averages_ || parameter.pending) return;
  const at::NoGradGuard no_grad;
  parameter.averaged_before = parameter.tensor.grad().clone();
}

void Reducer::look_at(const Parameter& parameter) {
  if (!all_finite(parameter.tensor.grad())) {
    if (bad_gradient_.empty()) bad_gradient_ = parameter.name;
  } else if (bad_gradient_ == parameter.name) {
    bad_gradient_.clear();
  }
}

std::string Reducer::name_of(const at::Tensor& parameter) const {
  const auto found = std::ranges::find(names_, parameter.unsafeGetTensorImpl(), [](const auto& n) { return n.second; });
  return found == names_.end() ? std::string() : found->first;
}

bool Reducer::averages(const at::Tensor& parameter) const {
  return std::ranges::any_of(parameters_, [&](const Parameter& p) { return p.tensor.is_same(parameter); });
}

/// Waits for no other rank, except inside join(): ranks may begin the models of one backward() in different orders.
void Reducer::prepare_pass(bool averages) {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  check_parameters();
  abandon_pass();
  correction_ = before_pass_ ? before_pass_(averages) : Correction{};
  if (averages) unfrozen_ = unfrozen();
  if (averages && !unfrozen_.empty()) fused_ = nullptr;
  if (own_ && !fused_) average_own();
  added_up_ = !averages;
  for (auto& p : parameters_) {
    p.reached = false;
    p.use = Use::unused;
  }
}

std::shared_ptr<Reducer::Pass> Reducer::begin_pass() {
  const bool averages = *no_sync_depth_ == 0;
  prepare_pass(averages);
  // All ranks do this alike, even if an exception has cut off the last pass: they compare what the optimizer notes
  // here.
  if (fused_ && begun_since_step_) fused_->another_pass();
  begun_since_step_ |= averages;
  if (any_left_) note_dropped();

  const auto pass = std::make_shared<Pass>();
  pass->reducer = weak_from_this();
  pass->averages = averages;
  pass_ = pass;
  if (!averages) {
    at_end_of_backward([pass, weak = weak_from_this()] {  // keeps the pass alive until then
      const auto self = weak.lock();
      if (!self) return;
      if (self->fused_) self->mark_gradients();
      self->passed_ = self->fingerprint();
    });
    return pass;
  }
  if (dense_->adds_up()) take_earlier();
  state_ = abandoned_.empty() && unfrozen_.empty() ? State::collecting : State::postponed;
  if (state_ == State::collecting) begin_exchanges(Arrival::in_backward);
  for (const auto& p : parameters_) pass->missing += in_backward(p);
  at_end_of_backward([weak = weak_from_this(), pass, complete = complete_in_this_backward()] {
    const auto self = weak.lock();
    if (!self) return;
    if (self->state_ == State::collecting) self->add_rest();
    complete->push_back(self);
    // After the rest of every other model in this backward(), which may come in another order on another rank.
    at_end_of_backward([complete] { finish_all(*complete); });
  });
  return pass;
}

/// The passes of a step add up what they find in .grad, so the gradients of earlier steps are put aside until its end.
void Reducer::take_earlier() {
  if (steps_->batch().micro_batch == 0) {
    bool left = false;
    for (auto& p : parameters_) left |= std::exchange(p.earlier, {}).defined();
    if (left)
      throw Error(ExitCode::user_error, averaging,
                  "the last step was left before its end, with gradients of earlier steps to be added to it",
                  "Run one backward() for each batch of a split dataset");
  }
  for (auto& p : parameters_) {
    auto& gradient = p.tensor.mutable_grad();
    if (gradient.defined() && (p.dense() || (!p.sparse && p.tensor.requires_grad())))
      p.earlier = std::exchange(gradient, {});
  }
}

/// What an exception has left of a step's gradients is dropped.
void Reducer::restore_earlier() noexcept {
  for (auto& p : parameters_)
    if (p.dense() || (!p.sparse && p.tensor.requires_grad())) p.tensor.mutable_grad() = std::move(p.earlier);
}

void Reducer::begin_exchanges(Arrival arrival) {
  dense_in_backward_ = !fused_;
  if (dense_in_backward_) dense_->begin(arrival, flags());
  if (sparse_) sparse_->begin(arrival, flags());
  for (auto& p : parameters_) p.added = false;
}

Flags Reducer::flags() const { return stop_requested_ && stop_requested_() ? stop_requested : 0; }

bool Reducer::in_backward(const Parameter& parameter) const noexcept {
  return parameter.exchanged() && (parameter.sparse || dense_in_backward_);
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
      keep_average(p);
      if (p.pending) p.use = Use::used;
    }
    add(p);
  }
}

/// For every gradient that the exchanges have not had.
void Reducer::add_nothing(Use use) {
  for (const auto& p : parameters_)
    if (in_backward(p) && !p.added) exchange_of(p).add(p.index, {}, use);
}

/// The reducers that have a pass in this thread's backward() and have everything for it.
std::shared_ptr<Reducer::Complete> Reducer::complete_in_this_backward() {
  static thread_local std::weak_ptr<Complete> current;
  auto complete = current.lock();
  if (!complete) current = complete = std::make_shared<Complete>();
  return complete;
}

/// In the order that all ranks share: finishing may be more than one message.
void Reducer::finish_all(Complete& complete) {
  auto all = std::exchange(complete, {});
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a->order_ < b->order_; });
  for (const auto& reducer : all) reducer->finish_pass();
}

void Reducer::finish_pass() {
  if (state_ == State::postponed) {
    finish_abandoned();
    extend_exchanges(unfrozen_);
    state_ = State::collecting;
    begin_exchanges(Arrival::at_once);
    add_rest();
  }
  state_ = dense_in_backward_ ? State::idle : State::awaiting_step;
  if (!dense_in_backward_) mark_gradients();
  try {
    finish_exchanges();
    const bool complete = !dense_in_backward_ || dense_->complete();
    if (complete && dense_in_backward_) count_pass(flags_of_all());
    for (auto& p : parameters_)
      if (in_backward(p)) complete ? store(p, true) : put_aside(p);
  } catch (...) {
    if (dense_->adds_up()) restore_earlier();
    throw;
  }
  passed_ = fingerprint();
}

/// The dense exchange first: until it is finished, its thread may use the process group.
void Reducer::finish_exchanges() {
  if (dense_in_backward_) dense_->finish();
  if (sparse_) sparse_->finish();
}

Flags Reducer::flags_of_all() const { return dense_->flags() | (sparse_ ? sparse_->flags() : 0); }

void Reducer::count_pass(Flags flags) {
  ++passes_;
  any_stop_requested_ = (flags & stop_requested) != 0;
}

/// Updates .grad after the gradient has been averaged (`fetch`) or used by the optimizer.
void Reducer::store(Parameter& parameter, bool fetch) {
  const int ranks = users(parameter);
  auto& gradient = parameter.tensor.mutable_grad();
  if (ranks > 0 && fetch) {
    exchange_of(parameter).fetch(parameter.index, gradient);
    const at::NoGradGuard no_grad;
    if (correction_.scale != 1.0) gradient.mul_(correction_.scale);
    if (correction_.earlier != 0.0 && parameter.averaged_before.defined())
      gradient.add_(parameter.averaged_before, correction_.earlier);
  } else if (ranks == 0 && parameter.padding) {
    gradient.reset();
  }
  if (parameter.earlier.defined()) {
    const at::NoGradGuard no_grad;
    if (gradient.defined()) parameter.earlier.add_(gradient);
    gradient = std::exchange(parameter.earlier, {});
  }
  parameter.pending = parameter.padding = false;
  parameter.averaged_before.reset();
}

/// Returns on how many ranks this pass has used the parameter. Throws an Error if a rank has abandoned the pass.
int Reducer::users(const Parameter& parameter) const {
  const int users = exchange_of(parameter).users(parameter.index);
  if (users < 0)
    throw Error(ExitCode::user_error, averaging, "another rank has left this backward() by an exception and gone on",
                "Let the exception end the training function");
  return users;
}

/// The exchange has it; the next pass begins afresh, and an optimizer has nothing to step with.
void Reducer::put_aside(Parameter& parameter) {
  parameter.tensor.mutable_grad().reset();
  parameter.pending = parameter.padding = false;
}

void Reducer::end_adding_up_on_all() {
  added_up_ = true;
  end_adding_up();
}

void Reducer::end_adding_up() {
  if (!added_up_) return;
  prepare_pass(true);
  state_ = State::postponed;  // there is no backward(), so all gradients are added at once
  finish_pass();
}

void Reducer::pass_without_gradients() {
  begin_exchanges(Arrival::at_once);
  add_nothing(Use::unused);
  finish_exchanges();
  count_pass(flags_of_all());
  for (const auto& p : parameters_)
    if (in_backward(p)) users(p);
}

/// An exception has cut backward() off: the exchange goes on with the gradients that it was given, so .grad gets memory
/// of its own, to which anything may be written.
void Reducer::take_own_memory() noexcept {
  if (state_ != State::collecting && state_ != State::postponed) return;
  if (dense_->adds_up()) return restore_earlier();
  if (state_ != State::collecting || !dense_in_backward_) return;
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

/// If an exception has cut the last pass off, tells the other ranks; they learn of it when they finish that pass.
void Reducer::abandon_pass() {
  if (state_ != State::collecting && state_ != State::postponed) return;
  const bool begun = std::exchange(state_, State::idle) == State::collecting;
  abandoned_.push_back({std::move(unfrozen_), begun});
  if (begun) add_nothing(Use::abandoned);
}

/// Collective if there are abandoned passes.
void Reducer::finish_abandoned() {
  for (const auto& pass : std::exchange(abandoned_, {})) {
    if (!pass.begun) {
      extend_exchanges(pass.unfrozen);
      begin_exchanges(Arrival::at_once);
      add_nothing(Use::abandoned);
    }
    finish_exchanges();
    if (!dense_in_backward_) {
      // Ranks that were not cut off begin the dense exchange in the optimizer's step.
      dense_->begin(Arrival::at_once, flags());
      for (const auto& p : parameters_)
        if (p.dense()) dense_->add(p.index, {}, Use::abandoned);
      dense_->finish();
    }
  }
}

void Reducer::recover() {
  abandon_pass();
  finish_abandoned();
}

/// Of a few parameters that have a gradient, spread from the first to the last; of all of them while gradients wait for
/// a step.
Fingerprint Reducer::fingerprint() const {
  std::vector<const at::Tensor*> trained;
  for (const auto& p : parameters_)
    if (p.tensor.grad().defined()) trained.push_back(&p.tensor);
  const auto count = any_left_ ? trained.size() : std::min(trained.size(), most_looked_at);
  std::vector<at::Tensor> some;
  for (std::size_t i = 0; i < count; ++i)
    some.push_back(*trained[count > 1 ? i * (trained.size() - 1) / (count - 1) : 0]);
  return Fingerprint(std::move(some));
}

/// If parameters have changed, an optimizer that is not prepared has stepped.
void Reducer::note_change_of_parameters() {
  if (!passed_ || state_ == State::awaiting_step || !passed_->changed()) return;
  for (auto& p : parameters_) p.waits = p.waits && !p.optimizer.expired();
}

/// As a pass begins: what was left at the last boundary was thrown away, or it is added to.
void Reducer::note_dropped() {
  note_change_of_parameters();
  for (auto& p : parameters_)
    if (std::exchange(p.left, false) && p.waits)
      p.dropped = !p.tensor.grad().defined() || !any_nonzero(p.tensor.grad());
}

void Reducer::note_step(std::size_t parameter, const std::weak_ptr<const void>& optimizer) {
  auto& p = parameters_[parameter];
  p.optimizer = optimizer;
  p.waits = false;
}

bool Reducer::stepped() {
  note_change_of_parameters();
  const bool prepared = std::ranges::any_of(parameters_, [](const Parameter& p) { return !p.optimizer.expired(); });
  any_left_ = false;
  bool none_waits = true;
  for (auto& p : parameters_) {
    const bool counts = p.waits && (!prepared || !p.optimizer.expired());
    p.left = counts && p.tensor.grad().defined() && any_nonzero(p.tensor.grad());
    any_left_ |= p.left;
    none_waits = none_waits && (!p.left || p.dropped);
  }
  return none_waits;
}

}  // namespace muster::detail::gradients
