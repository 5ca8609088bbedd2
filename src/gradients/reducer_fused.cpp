// The part of the reducer for fused optimizers. backward() leaves this rank's own gradients in .grad. The optimizer's
// step, or another reader of the averages, gives them to the exchange later.
#include "gradients/reducer.hpp"
#include "gradients/shared_exchange.hpp"
#include "muster/error.hpp"

#include <bit>

namespace muster::detail::gradients {

void Reducer::set_fused(FusedOptimizer* optimizer) {
  const auto before = local_.set_optimizer(optimizer);
  if (before != nullptr && before != optimizer) before->on_unfused();
}

/// Called when the fused optimizer that would have averaged .grad is gone: the round that now begins averages it
/// instead.
void Reducer::average_local_gradients() {
  rounds_.phase = Phase::idle;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    local_.note_manual_change(i);
    gradients_[i].pending |=
        exchanges_.has_dense(i) && parameters_[i].tensor.grad().defined() && !gradients_[i].padding;
  }
  local_.unmark_all();
  local_.forget_manual_changes();
}

void Reducer::before_own_change(std::size_t parameter) {
  local_.note_manual_change(parameter);
  local_.unmark(parameter);
}

void Reducer::before_own_change() {
  for (std::size_t i = 0; i < gradients_.size(); ++i) before_own_change(i);
}

void Reducer::begin_step(std::uint32_t word) {
  if (!awaits_step()) {
    // No backward() has run since the last step, so .grad holds what the program has put there.
    finish_abandoned_rounds();
    check_parameters();
    before_own_change();
    local_.forget_manual_changes();
  }
  give_gradients(event::averages_stepped, word);
}

/// Compares the flags of events over the ranks. Throws an Error, the same on all ranks, if they are not in the same
/// event of the same round; then the dense exchange has ended its round. `begun`: see ModelExchanges::drop_dense().
/// Collective.
void Reducer::agree(Flags mine, bool begun) {
  const auto all = exchanges_.fusable()->agree(mine);
  const bool abandoned = (all & event::backward_abandoned) != 0;
  const bool mixed = has_both(all, gradients_weighted, gradients_unweighted);
  const bool same_rounds = std::has_single_bit(all & event::after_any);
  if (!abandoned && !mixed && same_rounds && std::has_single_bit(all & event::any)) return;
  rounds_.phase = Phase::idle;
  exchanges_.drop_dense(begun);
  if (abandoned) throw_abandoned();
  if (!same_rounds) local_.end_step();  // all ranks count their rounds anew
  GivenWeights::require_alike(all);
  if ((all & event::backward_ended) == 0)
    throw Error(ExitCode::user_error, averaging,
                "some ranks step the optimizer that is fused with the averaging, while others average without it",
                "Call step(), average_gradients() and others that read averages in the same order on all ranks");
  throw Error(ExitCode::user_error, averaging,
              "the ranks have not run the same number of backward() since the last step",
              "Run the same backward() on all ranks, and let an exception in one end the training function");
}

/// `purpose`: event::averages_fetched or event::averages_stepped.
void Reducer::give_gradients(Flags purpose, std::uint32_t word) {
  agree(purpose | event::after_rounds(local_.rounds()), /*begun=*/false);
  bool altered = false, as_given = true;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    if (exchanges_.has_dense(i)) {
      if (parameters_[i].tensor.grad().defined()) parameters_[i].check_gradient();
      as_given = as_given && local_.is_as_given(i, use_in_step(i));
    }
    local_.note_manual_change(i);
    altered |= local_.is_altered(i);
  }
  exchanges_.give_left([this](std::size_t i) { return use_in_step(i); }, as_given && !altered,
                       rounds_.flags() | (altered ? gradients_changed : 0), word);
}

void Reducer::end_step(double scale) {
  end_exchange(/*fetch=*/false);
  if (scale == 1.0) return;
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    if (exchanges_.has_dense(i) && parameters_[i].tensor.grad().defined()) local_.scale_by(i, scale);
}

void Reducer::end_exchange(bool fetch) {
  const auto flags = exchanges_.dense().flags();
  rounds_.phase = Phase::idle;
  rounds_.count_averaged(flags);
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    if (exchanges_.has_dense(i))
      exchanges_.user_count(i);  // throws if a rank has abandoned the round; it would not take part in what follows
  if ((flags & gradients_changed) != 0) local_.throw_changed();
  local_.end_step();
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    if (exchanges_.has_dense(i)) finish_gradient(i, fetch);
}

void Reducer::fetch_averages() {
  average_accumulated();
  if (!local_.any()) return;
  if (!awaits_step()) finish_abandoned_rounds();
  give_gradients(event::averages_fetched, 0);
  exchanges_.dense().finish();
  local_.unmark_all();
  end_exchange(/*fetch=*/true);
}

}  // namespace muster::detail::gradients
