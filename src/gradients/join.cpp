#include "base/log.hpp"
#include "gradients/prepared_model.hpp"
#include "gradients/reducer.hpp"
#include "muster/error.hpp"
#include "muster/model.hpp"

#include <exception>
#include <utility>

namespace muster {

using detail::gradients::PreparedModel;
using detail::gradients::Reducer;

namespace {

[[noreturn]] void refuse(const char* fact, const char* remedy) {
  throw Error(ExitCode::usage, "joining ranks with different numbers of batches", fact, remedy);
}

void refuse_fused(const Reducer& reducer) {
  if (reducer.has_fused_optimizer())
    refuse("an optimizer is fused with the averaging of gradients", "Prepare it with Fuse::never");
}

/// Returns the only model whose gradients are averaged. Throws an Error if there is no such model or more than one, or
/// if the model has a SyncBatchNorm or an open Join.
std::shared_ptr<PreparedModel> only(const std::vector<std::shared_ptr<PreparedModel>>& models) {
  std::shared_ptr<PreparedModel> found;
  for (const auto& each : models) {
    if (!each->reducer()) continue;
    if (found) refuse("several models are prepared", "Prepare one model that holds them all");
    found = each;
  }
  if (!found) refuse("no model is prepared", "Call prepare_model first");
  if (found->has_sync_batch_norm())
    refuse("the model has a SyncBatchNorm, which waits for the forward passes of ranks that are done",
           "Use torch's batch-norm in it");
  if (found->reducer()->is_joined()) refuse("the model has an open Join already", "End that one first");
  return found;
}

}  // namespace

Join::Join(const std::vector<std::shared_ptr<PreparedModel>>& models, const JoinOptions& options)
    : model_(only(models)), exceptions_(std::uncaught_exceptions()) {
  auto& reducer = *model_->reducer();
  const double ranks = model_->channel().size();
  refuse_fused(reducer);
  const auto before = [this, &reducer, ranks, all = options.divide_by_initial_world_size](bool averages) {
    reducer.finish_abandoned_rounds();  // only this model can have any
    if (reducer.has_new_trainable())
      throw Error(ExitCode::user_error, "averaging gradients", "a parameter was unfrozen inside join()",
                  "Unfreeze it before, when all ranks have batches");
    refuse_fused(reducer);
    if (!averages) return Reducer::Correction{};
    const auto active = static_cast<double>(ranks_with_a_round(true));
    // Only the active ranks add the averages that earlier rounds have left in .grad; `earlier_factor` adds the part of
    // the others.
    return all ? Reducer::Correction{.earlier_factor = 1 - active / ranks}
               : Reducer::Correction{.scale = ranks / active};
  };
  reducer.before_each_round(before, options.divide_by_initial_world_size);
}

Join::~Join() {
  const auto reducer = model_->reducer();
  if (!finished_ && std::uncaught_exceptions() == exceptions_) try {
      finish();
    } catch (const std::exception& error) {
      detail::log::error(detail::str("At the end of join(): ", error.what()));
      reducer->fail_next_backward(std::current_exception());
    }
  reducer->before_each_round({});
}

void Join::finish() {
  if (std::exchange(finished_, true)) return;
  const auto reducer = model_->reducer();
  for (reducer->finish_abandoned_rounds(); ranks_with_a_round(false) > 0;) reducer->take_part_without_gradients();
  reducer->before_each_round({});
  const auto& channel = model_->channel();
  // Some ranks may have ended after rounds in no_sync(). Then all ranks average the gradients accumulated so far.
  if (channel.all_reduce(std::int64_t{reducer->last_round_was_no_sync()}, ReduceOp::max) != 0)
    reducer->average_accumulated_on_all();
  const auto last = channel.all_reduce(rounds_ * channel.size() + channel.rank(), ReduceOp::max);
  model_->broadcast_from(static_cast<int>(last % channel.size()));
}

std::int64_t Join::ranks_with_a_round(bool this_one) {
  rounds_ += this_one;
  return model_->channel().all_reduce(std::int64_t{this_one});
}

}  // namespace muster
