#include "gradients/reducer.hpp"

#include "comm/progress.hpp"
#include "gradients/hooks.hpp"
#include "gradients/prepared_model.hpp"
#include "gradients/shared_exchange.hpp"
#include "muster/error.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace muster::detail::gradients {
namespace {

std::atomic<int> reducers_made{0};

}  // namespace

struct Reducer::Round {
  std::weak_ptr<Reducer> reducer;
  bool averages = true;     ///< false in no_sync(): gradients are only accumulated
  std::size_t missing = 0;  ///< number of gradients that have not been given to an exchange

  ~Round() {
    if (const auto alive = reducer.lock()) alive->copy_gradients();
  }
};

Reducer::Reducer(std::shared_ptr<torch::nn::Module> module, const ParallelContext& context, MakeExchange make_dense,
                 MakeExchange make_sparse)
    : order_(++reducers_made),
      steps_(context.steps),
      parameters_(std::move(module)),
      exchanges_(parameters_, std::move(make_dense), std::move(make_sparse)),
      gradients_(parameters_.size()),
      rounds_{context.no_sync_depth, context.stop_requested},
      local_(parameters_, exchanges_),
      unstepped_(parameters_, rounds_) {}

at::Tensor Reducer::before_accumulation(std::size_t parameter, const at::Tensor& gradient) {
  const auto& tensor = parameters_[parameter].tensor;
  if (!accumulates(tensor)) return gradient;
  double weight = steps_->weight();
  if (round_.expired()) begin_round();
  before_own_change(parameter);
  if (weights_.given) weight *= weights_.unit;
  set_average_aside(parameter);
  auto& own = gradients_[parameter];
  own.fresh = !tensor.grad().defined();
  if (own.fresh) {
    // There is no .grad, so the program has discarded any earlier gradient.
    own.pending = false;
    own.padding = weight <= 0.0;
    own.averaged_before.reset();
  } else {
    keep_average(parameter);
  }
  // If the gradient is a view, its base has the same memory, and others_have_memory_of() would return true.
  if (weight == 1.0) return gradient.is_view() && !at::GradMode::is_enabled() ? gradient.detach() : gradient;
  if (weight > 0.0) return gradient * weight;
  return at::zeros_like(gradient);  // the loss of padding may be NaN, and 0 * NaN is NaN
}

void Reducer::after_accumulation(std::size_t parameter) {
  auto round = round_.lock();
  if (!round) round = begin_round();  // a backward() that ran inside this one has ended the outer round
  const auto& p = parameters_[parameter];
  auto& own = gradients_[parameter];
  p.check_gradient();
  unstepped_.note_gradient(parameter);
  if (own.reached)
    throw Error(ExitCode::data, averaging, "parameter " + p.name + " was given a gradient twice in one backward()",
                "Do not run backward() inside backward()");
  if (std::exchange(own.fresh, false) && others_have_memory_of(p.tensor.grad())) {
    const at::NoGradGuard no_grad;
    p.tensor.mutable_grad() = p.tensor.grad().clone();
  }

  if (bad_gradient_ && is_cheap_to_read(p.tensor)) check_numbers(p);
  const bool counts = steps_->weight() > 0.0;
  if (counts) own.padding = false;
  if (!round->averages) {
    own.pending |= counts;
    return;
  }
  own.reached = true;
  own.use = counts || own.pending ? ParameterUse::used : ParameterUse::unused;
  // The last gradient is only added after backward() has returned. If backward() throws before that, this rank can
  // still tell the others that it abandons the round.
  if (rounds_.phase == Phase::collecting && exchanges_.given_in_backward(parameter) && --round->missing > 0)
    exchanges_.add(parameter, own.use, use_in_step(parameter));
}

/// With weights, the exchange's result is divided by the mean weight. Averages of earlier rounds must not be divided
/// again, so they are moved out of .grad until the end of the round.
void Reducer::set_average_aside(std::size_t parameter) {
  auto& own = gradients_[parameter];
  auto& gradient = parameters_[parameter].tensor.mutable_grad();
  if (weights_.given && gradient.defined() && !own.pending && !own.padding &&
      !exchanges_.dense().takes_several_rounds())
    own.earlier = std::exchange(gradient, {});
}

void Reducer::keep_average(std::size_t parameter) {
  if (!joined_.keeps_averages || gradients_[parameter].pending) return;
  const at::NoGradGuard no_grad;
  gradients_[parameter].averaged_before = parameters_[parameter].tensor.grad().clone();
}

void Reducer::check_numbers(const ModelParameter& parameter) {
  if (!all_finite(parameter.tensor.grad())) {
    if (bad_gradient_->empty()) bad_gradient_ = parameter.name;
  } else if (*bad_gradient_ == parameter.name) {
    bad_gradient_->clear();
  }
}

/// Waits for no other rank, except inside join(): with several models, ranks may begin the rounds in different orders.
void Reducer::prepare_round(bool averages) {
  if (averages) comm::require_progress(averaging, "");
  if (joined_.failure) std::rethrow_exception(std::exchange(joined_.failure, nullptr));
  check_parameters();
  abandon_round();
  joined_.correction = joined_.before ? joined_.before(averages) : Correction{};
  if (averages) rounds_.unfrozen = exchanges_.unfrozen();
  if (averages && !rounds_.unfrozen.empty())
    local_.set_optimizer(nullptr);  // the optimizer's step fuses it again, with its state
  if (local_.any() && local_.optimizer() == nullptr) average_local_gradients();
  rounds_.fused = averages && has_fused_optimizer();
  rounds_.last_was_no_sync = !averages;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    auto& own = gradients_[i];
    own.reached = false;
    own.use = ParameterUse::unused;
    // The program has discarded .grad (zero_grad()), so it does not want the averages that were moved out of .grad
    // either.
    if (own.earlier.defined() && !exchanges_.dense().takes_several_rounds() && !local_.is_kept(i)) own.earlier.reset();
  }
}

/// True if .grad of any parameter holds gradients that are not averaged, and that the program has not discarded.
bool Reducer::any_pending_kept() const {
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    if (gradients_[i].pending && local_.is_kept(i)) return true;
  return false;
}

/// Call it before the round changes any member: it throws if weights are mixed.
void Reducer::begin_weights() {
  const auto& batch = steps_->batch();
  if (!batch.given && !weights_.given) return;
  const bool goes_on = rounds_.last_was_no_sync && any_pending_kept();
  // True if .grad still holds gradients without a weight that were left to a fused optimizer. Either the optimizer has
  // yet to average them, or it has averaged them without writing the averages to .grad.
  bool left = false;
  if (batch.given && !goes_on && local_.any())
    for (std::size_t i = 0; i < gradients_.size(); ++i) left = left || (exchanges_.has_dense(i) && local_.is_kept(i));
  weights_.begin(batch, goes_on, left);
}

/// Call it after a round that all ranks have finished.
void Reducer::end_weights() {
  if (!weights_.given) return;
  local_.unmark_all();
  local_.forget_manual_changes();
  if (weights_.end(exchanges_.mean_weight(), is_joined())) return;
  // All weights are 0, and an optimizer would step with the zeros that zero_grad(/*set_to_none=*/false) leaves, so
  // .grad is removed. Only averaged gradients are looked at, since these are the same on all ranks.
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    if (const auto& gradient = parameters_[i].tensor.grad();
        exchanges_.has(i) && gradient.defined() && any_nonzero(gradient))
      return;
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    if (exchanges_.has(i)) parameters_[i].tensor.mutable_grad().reset();
}

std::shared_ptr<Reducer::Round> Reducer::begin_round() {
  const bool averages = *rounds_.no_sync_depth == 0;
  begin_weights();
  unstepped_.note_addition(steps_->global_step, [&](std::size_t i) -> const at::Tensor& {
    return gradients_[i].earlier.defined() ? gradients_[i].earlier : parameters_[i].tensor.grad();
  });
  prepare_round(averages);
  const bool is_first = local_.begin_round(averages);
  exchanges_.spoil_early();
  unstepped_.note_discarded();

  const auto round = std::make_shared<Round>();
  round->reducer = weak_from_this();
  round->averages = averages;
  round_ = round;
  ++rounds_.begun;
  if (!averages) {
    at_end_of_backward([round, weak = weak_from_this()] {  // keeps the round alive until then
      const auto self = weak.lock();
      if (!self) return;
      if (self->has_fused_optimizer() || self->weights_.given) self->local_.mark_all(self->weights_.given);
      self->unstepped_.sample_parameters();
    });
    return round;
  }
  if (exchanges_.dense().takes_several_rounds()) set_earlier_gradients_aside();
  const bool leaves = rounds_.fused && !weights_.given;
  if (rounds_.abandoned.empty() && rounds_.unfrozen.empty() && (leaves || !exchanges_.has_early())) {
    rounds_.phase = Phase::collecting;
    begin_exchanges(Arrival::in_backward, rounds_.fused);
    if (leaves) exchanges_.begin_early(is_first);
  } else {
    rounds_.phase = Phase::postponed;
  }
  for (std::size_t i = 0; i < gradients_.size(); ++i) round->missing += exchanges_.given_in_backward(i);
  at_end_of_backward([weak = weak_from_this(), round, ready = ready_in_this_backward()] {
    const auto self = weak.lock();
    if (!self) return;
    if (self->rounds_.phase == Phase::collecting) self->add_remaining();
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
    for (auto& own : gradients_) left |= std::exchange(own.earlier, {}).defined();
    if (left)
      throw Error(ExitCode::user_error, averaging,
                  "the last step was not completed, and the gradients of earlier steps wait for its end",
                  "Run one backward() for each batch of a split dataset");
  }
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    auto& gradient = parameters_[i].tensor.mutable_grad();
    if (gradient.defined() && is_set_aside(i)) gradients_[i].earlier = std::exchange(gradient, {});
  }
}

bool Reducer::is_set_aside(std::size_t parameter) const {
  const auto& p = parameters_[parameter];
  return !p.sparse && (exchanges_.has(parameter) || p.tensor.requires_grad());
}

/// Called after an exception: drops the step's gradients and moves the gradients of earlier steps back into .grad.
void Reducer::restore_earlier_gradients() noexcept {
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    if (is_set_aside(i)) parameters_[i].tensor.mutable_grad() = std::move(gradients_[i].earlier);
}

/// `takes_part`: false if this rank contributes neither gradients nor a weight.
void Reducer::begin_exchanges(Arrival arrival, bool fused, bool takes_part) {
  const bool weighted = weights_.given;
  // At the end of join(), this rank may have had no round, and then its gradients are neither weighted nor unweighted.
  const bool has_any = weighted || arrival != Arrival::at_once || std::ranges::any_of(gradients_, &Gradient::pending);
  const auto kind = !takes_part || !has_any ? Flags{0} : weighted ? gradients_weighted : gradients_unweighted;
  exchanges_.begin(arrival, fused, weighted, rounds_.flags() | kind, takes_part && weighted ? weights_.sum : 0.0);
}

ParameterUse Reducer::use_in_step(std::size_t parameter) const {
  return parameters_[parameter].tensor.grad().defined() && !gradients_[parameter].padding ? ParameterUse::used
                                                                                          : ParameterUse::unused;
}

/// Adds the gradients that the exchanges have not been given. For a parameter that this round did not reach, adds .grad
/// as earlier rounds have left it; all ranks have the same .grad, unless it is pending.
void Reducer::add_remaining() {
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    if (!exchanges_.given_in_backward(i) || exchanges_.was_added(i)) continue;
    auto& own = gradients_[i];
    if (!own.reached) {
      if (exchanges_.gives_early()) before_own_change(i);
      set_average_aside(i);
    }
    if (!own.reached && parameters_[i].tensor.grad().defined()) {
      parameters_[i].check_gradient();
      keep_average(i);
      if (own.pending) own.use = ParameterUse::used;
    }
    exchanges_.add(i, own.use, use_in_step(i));
  }
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
  const bool postponed = rounds_.phase == Phase::postponed;
  if (postponed) {
    finish_abandoned();
    exchanges_.extend(rounds_.unfrozen);
  }
  if (rounds_.fused)
    agree(event::backward_ended | event::after_rounds(local_.rounds()) |
              (weights_.given ? gradients_weighted : gradients_unweighted),
          !postponed);
  if (postponed) {
    rounds_.phase = Phase::collecting;
    begin_exchanges(Arrival::at_once, rounds_.fused);
    add_remaining();
  }
  const bool dense_in_backward = exchanges_.dense_in_backward();
  rounds_.phase = dense_in_backward ? Phase::idle : Phase::awaiting_step;
  if (!dense_in_backward) local_.mark_all(weights_.given);
  try {
    exchanges_.finish();
    const bool complete = !dense_in_backward || exchanges_.dense().is_step_complete();
    const auto flags = complete ? exchanges_.flags() : Flags{0};
    GivenWeights::require_alike(flags);
    if ((flags & gradients_weighted) != 0) weights_.given = true;
    if (complete && dense_in_backward) rounds_.count_averaged(flags);
    for (std::size_t i = 0; i < gradients_.size(); ++i)
      if (exchanges_.averages_in_backward(i)) complete ? finish_gradient(i, true) : clear_gradient(i);
    if (complete) end_weights();
  } catch (...) {
    if (exchanges_.dense().takes_several_rounds()) restore_earlier_gradients();
    throw;
  }
  unstepped_.sample_parameters();
}

/// Updates .grad at the end of a round. `fetch`: true if .grad becomes the average; false if a fused optimizer has used
/// the average already.
void Reducer::finish_gradient(std::size_t parameter, bool fetch) {
  const int ranks = exchanges_.user_count(parameter);
  auto& own = gradients_[parameter];
  auto& gradient = parameters_[parameter].tensor.mutable_grad();
  if (ranks > 0 && fetch) {
    exchanges_.fetch(parameter, gradient);
    const at::NoGradGuard no_grad;
    const double weight = weights_.given ? exchanges_.mean_weight(parameter) : 0;
    const double scale = weight > 0 ? 1 / weight : joined_.correction.scale;
    if (scale != 1.0) gradient.mul_(scale);
    if (joined_.correction.earlier_factor != 0.0 && own.averaged_before.defined())
      gradient.add_(own.averaged_before, joined_.correction.earlier_factor);
  } else if (ranks == 0 && own.padding) {
    gradient.reset();
  }
  if (own.earlier.defined()) {
    const at::NoGradGuard no_grad;
    if (gradient.defined()) own.earlier.add_(gradient);
    gradient = std::exchange(own.earlier, {});
  }
  own.pending = own.padding = false;
  own.averaged_before.reset();
}

/// Clears .grad after the exchange has copied it: the next round starts from zero, and no optimizer steps with a part
/// of a step.
void Reducer::clear_gradient(std::size_t parameter) {
  parameters_[parameter].tensor.mutable_grad().reset();
  gradients_[parameter].pending = gradients_[parameter].padding = false;
}

void Reducer::average_accumulated() {
  if (!rounds_.last_was_no_sync) return;
  prepare_round(true);
  rounds_.phase = Phase::postponed;  // there is no backward(), so all gradients are added at once
  finish_round();
}

void Reducer::take_part_without_gradients() {
  rounds_.fused = false;
  rounds_.phase = Phase::collecting;  // until nothing is missing
  begin_exchanges(Arrival::at_once, rounds_.fused, /*takes_part=*/false);
  exchanges_.add_missing(ParameterUse::unused);
  rounds_.phase = Phase::idle;
  exchanges_.finish();
  rounds_.count_averaged(exchanges_.flags());
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    if (exchanges_.averages_in_backward(i)) exchanges_.user_count(i);
}

/// Called when an exception has ended backward(). The exchange keeps using the memory of the gradients that it was
/// given. So .grad gets copies, which the program may change.
void Reducer::copy_gradients() noexcept {
  if (!rounds_.is_open()) return;
  if (exchanges_.dense().takes_several_rounds()) return restore_earlier_gradients();
  if (rounds_.phase != Phase::collecting || !exchanges_.dense_in_backward()) return;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    auto& gradient = parameters_[i].tensor.mutable_grad();
    if (!exchanges_.has_dense(i) || !exchanges_.was_added(i) || !gradient.defined()) continue;
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
  if (rounds_.abandon()) exchanges_.add_missing(ParameterUse::abandoned);
}

/// Finishes all abandoned rounds. Collective if there are any.
void Reducer::finish_abandoned() {
  while (!rounds_.abandoned.empty()) {
    const auto round = rounds_.abandoned.front();
    if (!round.begun) exchanges_.extend(round.unfrozen);
    rounds_.abandoned.erase(rounds_.abandoned.begin());
    if (round.fused) {
      exchanges_.fusable()->agree(event::backward_abandoned);
      exchanges_.drop_dense(round.begun);
      continue;
    }
    if (!round.begun) {
      begin_exchanges(Arrival::at_once, /*fused=*/false, /*takes_part=*/false);
      exchanges_.add_missing(ParameterUse::abandoned);
    }
    exchanges_.finish();
  }
}

std::optional<Reducer::LocalWeights> Reducer::local_weights() const {
  if (!accumulates_with_weights()) return {};
  return LocalWeights{any_pending_kept() ? weights_.sum : 0, weights_.unit};
}

void Reducer::restore_gradients(const std::map<const void*, at::Tensor>& saved,
                                const std::optional<LocalWeights>& weights) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const auto& p = parameters_[i];
    const auto found = saved.find(p.tensor.unsafeGetTensorImpl());
    if (found == saved.end()) continue;
    clear_gradient(i);
    local_.unmark(i);
    unstepped_.note_gradient(i, found->second.defined());
    if (!found->second.defined()) continue;
    auto gradient = at::empty_like(p.tensor).copy_(found->second);
    p.tensor.mutable_grad() = p.sparse ? gradient.to_sparse(1) : std::move(gradient);
    gradients_[i].pending = weights.has_value();
    if (weights) local_.mark(i);
  }
  if (weights) {
    weights_ = {.given = true, .unit = weights->unit, .sum = weights->sum};
    rounds_.last_was_no_sync = true;
  }
  unstepped_.sample_parameters();
}

}  // namespace muster::detail::gradients
