#include "gradients/reducer.hpp"

#include "base/log.hpp"
#include "comm/progress.hpp"
#include "gradients/hooks.hpp"
#include "gradients/prepared_model.hpp"
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
#include <cmath>
#include <set>
#include <string_view>
#include <utility>

namespace muster::detail::gradients {
namespace {

[[noreturn]] void refuse(const std::string& fact) {
  throw Error(ExitCode::data, averaging, fact, "Change the model first, then call prepare_model");
}

std::atomic<int> reducers_made{0};

}  // namespace

struct Reducer::Round {
  std::weak_ptr<Reducer> reducer;
  bool averages = true;     ///< false in no_sync(): gradients are only accumulated
  std::size_t missing = 0;  ///< number of gradients that add() has not yet given to an exchange

  ~Round() {
    if (const auto alive = reducer.lock()) alive->copy_gradients();
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
    : order_(++reducers_made),
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

/// `unfrozen`: the parameters without an exchange that required a gradient when the round began. They are passed as an
/// argument, since the program may freeze or unfreeze parameters before this rank finishes the round.
void Reducer::extend_exchanges(const std::vector<std::size_t>& unfrozen) {
  bool extends = !dense_;
  for (const auto i : unfrozen) extends |= !parameters_[i].exchanged();
  if (!extends) return;
  end_early(/*valid=*/false);
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
  double weight = steps_->weight();
  if (round_.expired()) begin_round();
  note_manual_change(p);
  p.mark.reset();
  if (weights_.given) weight *= weights_.unit;
  set_average_aside(p);
  p.fresh = !p.tensor.grad().defined();
  if (p.fresh) {
    // There is no .grad, so the program has discarded any earlier gradient.
    p.pending = false;
    p.padding = weight <= 0.0;
    p.averaged_before.reset();
  } else {
    keep_average(p);
  }
  // If the gradient is a view, its base has the same memory, and others_have_memory_of() would return true.
  if (weight == 1.0) return gradient.is_view() && !at::GradMode::is_enabled() ? gradient.detach() : gradient;
  if (weight > 0.0) return gradient * weight;
  return at::zeros_like(gradient);  // the loss of padding may be NaN, and 0 * NaN is NaN
}

void Reducer::after_accumulation(std::size_t parameter) {
  auto round = round_.lock();
  if (!round) round = begin_round();  // a backward() that ran inside this one has ended the outer round
  auto& p = parameters_[parameter];
  p.check_gradient();
  p.awaits_step = true;
  if (p.reached)
    throw Error(ExitCode::data, averaging, "parameter " + p.name + " was given a gradient twice in one backward()",
                "Do not run backward() inside backward()");
  if (std::exchange(p.fresh, false) && others_have_memory_of(p.tensor.grad())) {
    const at::NoGradGuard no_grad;
    p.tensor.mutable_grad() = p.tensor.grad().clone();
  }

  if (watches_numbers_ && p.tensor.numel() <= small_elements && p.tensor.is_cpu()) check_numbers(p);
  const bool counts = steps_->weight() > 0.0;
  if (counts) p.padding = false;
  if (!round->averages) {
    p.pending |= counts;
    return;
  }
  p.reached = true;
  p.use = counts || p.pending ? ParameterUse::used : ParameterUse::unused;
  // The last gradient is only added after backward() has returned. If backward() throws before that, this rank can
  // still tell the others that it abandons the round.
  if (phase_ == Phase::collecting && given_in_backward(p) && --round->missing > 0) add(p);
}

/// With weights, the exchange's result is divided by the mean weight. Averages of earlier rounds must not be divided
/// again, so they are moved out of .grad until the end of the round.
void Reducer::set_average_aside(Parameter& parameter) const {
  auto& gradient = parameter.tensor.mutable_grad();
  if (weights_.given && gradient.defined() && !parameter.pending && !parameter.padding &&
      !dense_->takes_several_rounds())
    parameter.earlier = std::exchange(gradient, {});
}

void Reducer::keep_average(Parameter& parameter) const {
  if (!keeps_averages_ || parameter.pending) return;
  const at::NoGradGuard no_grad;
  parameter.averaged_before = parameter.tensor.grad().clone();
}

void Reducer::check_numbers(const Parameter& parameter) {
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

/// Waits for no other rank, except inside join(): with several models, ranks may begin the rounds in different orders.
void Reducer::prepare_round(bool averages) {
  if (averages) comm::require_progress(averaging, "");
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  check_parameters();
  abandon_round();
  correction_ = before_round_ ? before_round_(averages) : Correction{};
  if (averages) unfrozen_ = unfrozen();
  if (averages && !unfrozen_.empty()) fused_ = nullptr;  // the optimizer's step fuses it again, with its state
  if (has_local_gradients_ && !fused_) average_local_gradients();
  last_round_was_no_sync_ = !averages;
  for (auto& p : parameters_) {
    p.reached = false;
    p.use = ParameterUse::unused;
    // The program has discarded .grad (zero_grad()), so it does not want the averages that were moved out of .grad
    // either.
    if (p.earlier.defined() && !dense_->takes_several_rounds() && !holds_gradient(p)) p.earlier.reset();
  }
}

/// True if the program has not discarded .grad. A gradient whose elements all are zero counts as kept if it has its
/// mark.
bool Reducer::holds_gradient(const Parameter& parameter) const {
  const auto& gradient = parameter.tensor.grad();
  return gradient.defined() && ((parameter.mark && mark_of(parameter) == *parameter.mark) || any_nonzero(gradient));
}

/// Call it before the round changes any member: it throws if weights are mixed.
void Reducer::begin_weights() {
  const auto& batch = steps_->batch();
  if (!batch.given && !weights_.given) return;
  const auto holds_any = [&](const Parameter& p) { return holds_gradient(p); };
  const bool goes_on = last_round_was_no_sync_ &&
                       std::ranges::any_of(parameters_, [&](const auto& p) { return p.pending && holds_any(p); });
  // True if .grad still holds gradients without a weight that were left to a fused optimizer. Either the optimizer has
  // yet to average them, or it has averaged them without writing the averages to .grad.
  const bool left = batch.given && !goes_on && has_local_gradients_ &&
                    std::ranges::any_of(parameters_, [&](const auto& p) { return p.dense() && holds_any(p); });
  if (left || (goes_on && weights_.given != batch.given.has_value()))
    throw Error(ExitCode::usage, averaging,
                "gradients of batches with and without a weight are added up before they are averaged",
                "Give step() a weight for every batch of a step or for none, and call zero_grad() after the step");
  weights_.given = batch.given.has_value();
  if (!goes_on) weights_.sum = 0;
  if (!batch.given) return;
  // Until the first mean of weights is known, assume that the weights are numbers of samples.
  if (weights_.unit == 0)
    weights_.unit = batch.global > 0 ? std::exp2(-std::ilogb(static_cast<double>(batch.global) / batch.total)) : 1;
  weights_.sum += *batch.given * weights_.unit;
}

/// Call it after a round that all ranks have finished.
void Reducer::end_weights() {
  if (!weights_.given) return;
  const double mean = std::max(dense_->mean_weight(), sparse_ ? sparse_->mean_weight() : 0);
  weights_.relative = mean > 0 ? weights_.sum / mean : 0;
  weights_.sum = 0;
  has_local_gradients_ = false;
  for (auto& p : parameters_) {
    p.mark.reset();
    p.altered = false;
  }
  // Inside join(), ranks without batches take no part here and would keep another unit.
  if (mean > 0 && !is_joined()) weights_.unit *= std::exp2(-std::ilogb(mean));
  if (mean > 0) return;
  // All weights are 0, and an optimizer would step with the zeros that zero_grad(/*set_to_none=*/false) leaves, so
  // .grad is removed. Only averaged gradients are looked at, since these are the same on all ranks.
  const auto is_nonzero = [](const Parameter& p) {
    return p.exchanged() && p.tensor.grad().defined() && any_nonzero(p.tensor.grad());
  };
  if (std::ranges::none_of(parameters_, is_nonzero))
    for (auto& p : parameters_)
      if (p.exchanged()) p.tensor.mutable_grad().reset();
  if (!std::exchange(weights_.warned, true))
    log::warn(
        "step() was given the weight 0 on all ranks, so no gradients are averaged and no optimizer steps with "
        "them. A loss is a mean over nothing; this is said once");
}

void Reducer::require_weights_alike(Flags flags) const {
  if (has_both(flags, gradients_weighted, gradients_unweighted))
    throw Error(ExitCode::usage, averaging, "step() was given a weight for some batches of a step only",
                "Give it a weight for every batch and on every rank, 0 where nothing counts");
}

std::shared_ptr<Reducer::Round> Reducer::begin_round() {
  const bool averages = *no_sync_depth_ == 0;
  begin_weights();
  note_addition();
  prepare_round(averages);
  // Every rank does this, even a rank whose last round an exception has ended, since the ranks later compare what the
  // optimizer records here.
  if (fused_ && begun_since_step_) fused_->on_second_round();
  const bool is_first = !begun_since_step_;
  begun_since_step_ |= averages;
  if (early_ == Early::begun) early_ = Early::useless;
  if (any_left_) note_discarded();

  const auto round = std::make_shared<Round>();
  round->reducer = weak_from_this();
  round->averages = averages;
  round_ = round;
  ++begun_rounds_;
  if (!averages) {
    at_end_of_backward([round, weak = weak_from_this()] {  // keeps the round alive until then
      const auto self = weak.lock();
      if (!self) return;
      if (self->fused_ || self->weights_.given) self->mark_gradients();
      self->after_backward_ = self->sample_parameters();
    });
    return round;
  }
  if (dense_->takes_several_rounds()) set_earlier_gradients_aside();
  const bool leaves = fused_ != nullptr && !weights_.given;
  const bool ready = abandoned_.empty() && unfrozen_.empty() && (leaves || early_ == Early::no);
  phase_ = ready ? Phase::collecting : Phase::postponed;
  if (phase_ == Phase::collecting) begin_exchanges(Arrival::in_backward);
  if (ready && leaves && is_first && early_ == Early::no && dense_->fusable()->averages_early()) {
    dense_->begin(Arrival::left_in_backward, 0, 0);
    early_ = Early::begun;
  }
  for (const auto& p : parameters_) round->missing += given_in_backward(p);
  at_end_of_backward([weak = weak_from_this(), round, ready = ready_in_this_backward()] {
    const auto self = weak.lock();
    if (!self) return;
    if (self->phase_ == Phase::collecting) self->add_remaining();
    ready->push_back(self);
    // Runs after the other models of this backward() have added their gradients. Ranks may differ in the order of
    // models.
    at_end_of_backward([ready] { finish_all(*ready); });
  });
  return round;
}

/// With virtual workers, a step's rounds accumulate in .grad. Gradients of earlier steps are moved out of it until the
/// step ends.
void Reducer::set_earlier_gradients_aside() {
  if (steps_->batch().micro_batch == 0) {
    bool left = false;
    for (auto& p : parameters_) left |= std::exchange(p.earlier, {}).defined();
    if (left)
      throw Error(ExitCode::user_error, averaging,
                  "the last step was not completed, and the gradients of earlier steps wait for its end",
                  "Run one backward() for each batch of a split dataset");
  }
  for (auto& p : parameters_) {
    auto& gradient = p.tensor.mutable_grad();
    if (gradient.defined() && (p.dense() || (!p.sparse && p.tensor.requires_grad())))
      p.earlier = std::exchange(gradient, {});
  }
}

/// Called after an exception: drops the step's gradients and moves the gradients of earlier steps back into .grad.
void Reducer::restore_earlier_gradients() noexcept {
  for (auto& p : parameters_)
    if (p.dense() || (!p.sparse && p.tensor.requires_grad())) p.tensor.mutable_grad() = std::move(p.earlier);
}

void Reducer::begin_exchanges(Arrival arrival, bool takes_part) {
  dense_in_backward_ = !fused_ || weights_.given;
  // At the end of join(), this rank may have had no round, and then its gradients are neither weighted nor unweighted.
  const bool has_any =
      weights_.given || arrival != Arrival::at_once || std::ranges::any_of(parameters_, &Parameter::pending);
  const auto kind = !takes_part || !has_any ? Flags{0} : weights_.given ? gradients_weighted : gradients_unweighted;
  const auto weight = takes_part && weights_.given ? weights_.sum : 0.0;
  if (dense_in_backward_) {
    end_early(/*valid=*/false);
    // Another rank may have no weight and leave its gradients to the fused optimizer: both must send the same messages.
    const auto left = arrival == Arrival::in_backward ? Arrival::left_in_backward : Arrival::left;
    dense_->begin(fused_ && dense_->fusable()->averages_early() ? left : arrival, flags() | kind, weight);
  }
  if (sparse_) sparse_->begin(arrival, flags() | kind, weight);
  for (auto& p : parameters_) p.added = false;
}

Flags Reducer::flags() const { return stop_requested_ && stop_requested_() ? stop_requested : 0; }

bool Reducer::averages_in_backward(const Parameter& parameter) const noexcept {
  return parameter.exchanged() && (parameter.sparse || dense_in_backward_);
}

bool Reducer::given_in_backward(const Parameter& parameter) const noexcept {
  return averages_in_backward(parameter) || (parameter.dense() && early_ == Early::begun);
}

void Reducer::add(Parameter& parameter) {
  parameter.added = true;
  parameter.given = averages_in_backward(parameter) ? parameter.use : parameter.use_in_step();
  exchange_of(parameter).add(parameter.index, parameter.tensor.grad(), parameter.given);
}

/// Adds the gradients that the exchanges have not been given. For a parameter that this round did not reach, adds .grad
/// as earlier rounds have left it; all ranks have the same .grad, unless it is pending.
void Reducer::add_remaining() {
  for (auto& p : parameters_) {
    if (!given_in_backward(p) || p.added) continue;
    if (!p.reached) {
      if (early_ == Early::begun) before_own_change(p);
      set_average_aside(p);
    }
    if (!p.reached && p.tensor.grad().defined()) {
      p.check_gradient();
      keep_average(p);
      if (p.pending) p.use = ParameterUse::used;
    }
    add(p);
  }
}

/// Adds an undefined gradient in place of every gradient that the exchanges have not been given.
void Reducer::add_missing(ParameterUse use) {
  for (const auto& p : parameters_)
    if (given_in_backward(p) && !p.added) exchange_of(p).add(p.index, {}, use);
}

/// Returns the list of reducers that have added all gradients of their round in the backward() that this thread runs.
std::shared_ptr<Reducer::Reducers> Reducer::ready_in_this_backward() {
  static thread_local std::weak_ptr<Reducers> current;
  auto ready = current.lock();
  if (!ready) current = ready = std::make_shared<Reducers>();
  return ready;
}

/// Finishes the rounds in the same order on all ranks, since finishing one may take several messages.
void Reducer::finish_all(Reducers& ready) {
  auto all = std::exchange(ready, {});
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a->order_ < b->order_; });
  for (const auto& reducer : all) reducer->finish_round();
}

void Reducer::finish_round() {
  if (phase_ == Phase::postponed) {
    finish_abandoned();
    extend_exchanges(unfrozen_);
    phase_ = Phase::collecting;
    begin_exchanges(Arrival::at_once);
    add_remaining();
  }
  phase_ = dense_in_backward_ ? Phase::idle : Phase::awaiting_step;
  if (!dense_in_backward_) mark_gradients();
  try {
    finish_exchanges();
    const bool complete = !dense_in_backward_ || dense_->is_step_complete();
    if (complete) require_weights_alike(flags_of_all());
    if (complete && (flags_of_all() & gradients_weighted) != 0) weights_.given = true;
    if (complete && dense_in_backward_) count_round(flags_of_all());
    for (auto& p : parameters_)
      if (averages_in_backward(p)) complete ? finish_gradient(p, true) : clear_gradient(p);
    if (complete) end_weights();
  } catch (...) {
    if (dense_->takes_several_rounds()) restore_earlier_gradients();
    throw;
  }
  after_backward_ = sample_parameters();
}

/// Finishes the dense exchange first: until then, its progress thread may use the process group.
void Reducer::finish_exchanges() {
  if (dense_in_backward_) dense_->finish();
  if (sparse_) sparse_->finish();
}

Flags Reducer::flags_of_all() const {
  return (dense_in_backward_ ? dense_->flags() : 0) | (sparse_ ? sparse_->flags() : 0);
}

void Reducer::count_round(Flags flags) {
  ++rounds_;
  any_stop_requested_ = (flags & stop_requested) != 0;
}

/// Updates .grad at the end of a round. `fetch`: true if .grad becomes the average; false if a fused optimizer has used
/// the average already.
void Reducer::finish_gradient(Parameter& parameter, bool fetch) {
  const int ranks = user_count(parameter);
  auto& gradient = parameter.tensor.mutable_grad();
  if (ranks > 0 && fetch) {
    exchange_of(parameter).fetch(parameter.index, gradient);
    const at::NoGradGuard no_grad;
    const double weight = weights_.given ? exchange_of(parameter).mean_weight() : 0;
    const double scale = weight > 0 ? 1 / weight : correction_.scale;
    if (scale != 1.0) gradient.mul_(scale);
    if (correction_.earlier_factor != 0.0 && parameter.averaged_before.defined())
      gradient.add_(parameter.averaged_before, correction_.earlier_factor);
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

/// Returns how many ranks have used the parameter in this round. Throws an Error if a rank has abandoned the round.
int Reducer::user_count(const Parameter& parameter) const {
  const int users = exchange_of(parameter).user_count(parameter.index);
  if (users < 0)
    throw Error(ExitCode::user_error, averaging,
                "another rank has left this backward() by an exception and has continued training",
                "Let the exception end the training function");
  return users;
}

/// Clears .grad after the exchange has copied it: the next round starts from zero, and no optimizer steps with a part
/// of a step.
void Reducer::clear_gradient(Parameter& parameter) {
  parameter.tensor.mutable_grad().reset();
  parameter.pending = parameter.padding = false;
}

void Reducer::average_accumulated_on_all() {
  last_round_was_no_sync_ = true;
  average_accumulated();
}

void Reducer::average_accumulated() {
  if (!last_round_was_no_sync_) return;
  prepare_round(true);
  phase_ = Phase::postponed;  // there is no backward(), so all gradients are added at once
  finish_round();
}

void Reducer::take_part_without_gradients() {
  begin_exchanges(Arrival::at_once, /*takes_part=*/false);
  add_missing(ParameterUse::unused);
  finish_exchanges();
  count_round(flags_of_all());
  for (const auto& p : parameters_)
    if (averages_in_backward(p)) user_count(p);
}

/// Called when an exception has ended backward(). The exchange keeps using the memory of the gradients that it was
/// given. So .grad gets copies, which the program may change.
void Reducer::copy_gradients() noexcept {
  if (phase_ != Phase::collecting && phase_ != Phase::postponed) return;
  if (dense_->takes_several_rounds()) return restore_earlier_gradients();
  if (phase_ != Phase::collecting || !dense_in_backward_) return;
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

/// If an exception has ended the last round, marks its missing gradients as abandoned. The other ranks learn of it when
/// they finish that round.
void Reducer::abandon_round() {
  if (phase_ != Phase::collecting && phase_ != Phase::postponed) return;
  const bool begun = std::exchange(phase_, Phase::idle) == Phase::collecting;
  abandoned_.push_back({std::move(unfrozen_), begun});
  if (begun) add_missing(ParameterUse::abandoned);
}

/// Finishes all abandoned rounds. Collective if there are any.
void Reducer::finish_abandoned() {
  for (const auto& round : std::exchange(abandoned_, {})) {
    if (!round.begun) {
      extend_exchanges(round.unfrozen);
      begin_exchanges(Arrival::at_once, /*takes_part=*/false);
      add_missing(ParameterUse::abandoned);
    }
    finish_exchanges();
    if (!dense_in_backward_) {
      // With a fused optimizer, the other ranks begin the dense exchange in the optimizer's step, which does not come
      // after they have learned from the sparse exchange.
      if (sparse_) continue;
      end_early(/*valid=*/false);
      dense_->begin(Arrival::left, flags(), 0);
      for (const auto& p : parameters_)
        if (p.dense()) dense_->add(p.index, {}, ParameterUse::abandoned);
      dense_->finish();
    }
  }
}

void Reducer::finish_abandoned_rounds() {
  abandon_round();
  finish_abandoned();
}

}  // namespace muster::detail::gradients
