#include "session/stop.hpp"

#include "base/log.hpp"
#include "gradients/reducer.hpp"
#include "gradients/tensor_changes.hpp"
#include "muster/error.hpp"
#include "session/session_state.hpp"
#include "state/stateful.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace muster::detail::session {
namespace {

/// After this many boundaries with accumulated gradients the run stops without saving them. A learning rate of 0 looks
/// like accumulation, too.
constexpr int longest_accumulation = 1000;

bool is_joined(const std::shared_ptr<gradients::DataParallel>& model) {
  const auto reducer = model->reducer();
  return reducer && reducer->is_joined();
}

std::size_t hash_of(const at::Tensor& tensor) {
  if (tensor.layout() == at::kSparse) {
    const auto once = tensor.coalesce();
    return hash_of(once.indices()) * 31 + hash_of(once.values());
  }
  const auto bytes = tensor.detach().cpu().contiguous();
  return std::hash<std::string_view>()({static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()});
}

}  // namespace

void StopRequest::merge(bool any_asked) noexcept {
  known_ = known_ || any_asked;
  boundaries_ = 0;
  exchanged_ = {};
}

bool StopRequest::exchange(const Communicator& communicator, bool asked_here) {
  if (known_ || ++boundaries_ < interval_) return false;
  constexpr double share = 0.01;
  const auto begin = Clock::now();
  double boundaries = 1;
  if (exchanged_ != Clock::time_point{} && begin > exchanged_) {
    const auto each = std::chrono::duration<double>(begin - exchanged_).count() / static_cast<double>(boundaries_);
    boundaries = std::ceil(std::chrono::duration<double>(cost_).count() / (share * each));
  }
  // One slow exchange must not delay the next one for long.
  const auto most = static_cast<double>(2 * interval_);
  std::array<std::int64_t, 2> words{asked_here, static_cast<std::int64_t>(std::clamp(boundaries, 1.0, most))};
  communicator.all_reduce(std::span(words), ReduceOp::max);
  exchanged_ = Clock::now();
  cost_ = exchanged_ - begin;
  known_ = words[0] != 0;
  interval_ = words[1];
  boundaries_ = 0;
  return true;
}

bool StopFile::exists() {
  if (seen_ || path_.empty()) return seen_;
  const auto now = Clock::now();
  if (now - looked_ < std::chrono::seconds(1)) return false;
  looked_ = now;
  std::error_code ignored;  // the folder may not answer now; the next call asks again
  seen_ = std::filesystem::exists(path_, ignored);
  if (seen_) log::info("stopping, as " + path_.string() + " is there");
  return seen_;
}

void StopFile::remove() noexcept {
  if (path_.empty()) return;
  std::error_code error;
  std::filesystem::remove(path_, error);
  if (error)
    log::warn("removing " + path_.string() + ": " + error.message() +
              ". Remove it, since it stops the next start, too");
}

void ShutdownBudget::reached_boundary() noexcept {
  if (left_ != Clock::time_point{}) longest_interval_ = std::max(longest_interval_, Clock::now() - left_);
}

std::chrono::nanoseconds ShutdownBudget::full_budget(std::optional<Clock::duration> under_way) const noexcept {
  return longest_interval_ + saves_take(2, under_way) + std::chrono::seconds(1);
}

std::chrono::nanoseconds ShutdownBudget::least_budget(std::optional<Clock::duration> under_way) const noexcept {
  return longest_interval_ + saves_take(1, under_way);
}

/// How long `count` saves take, after the one that is in progress.
std::chrono::nanoseconds ShutdownBudget::saves_take(int count,
                                                    std::optional<Clock::duration> under_way) const noexcept {
  const auto save = std::max(slowest_.value_or(std::chrono::duration_cast<Clock::duration>(expected_)),
                             under_way.value_or(Clock::duration{}));
  return (under_way ? count + 1 : count) * save;
}

bool AccumulatedGradients::any(const std::vector<std::vector<at::Tensor>>& models) {
  const at::NoGradGuard no_grad;
  bool any = false;
  for (const auto& model : models) {
    if (model.empty()) continue;
    Model now;
    bool none = true;
    for (const auto& parameter : model) {
      now.parameters = now.parameters * 31 + hash_of(parameter);
      const auto& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      now.gradients = now.gradients * 31 + hash_of(gradient);
      none = none && !gradients::any_nonzero(gradient);
    }
    const auto [before, is_new] = models_.try_emplace(model.front().unsafeGetTensorImpl());
    const auto& was = before->second;
    const bool stepped = !is_new && now.parameters != was.parameters;
    now.used = none || stepped || (was.used && now.gradients == was.gradients);
    any = any || !now.used;
    before->second = now;
  }
  return any;
}

bool SessionState::is_asked_to_stop() {
  if (resolved.launch.stop_requested() || stop.file.exists()) return true;
  const auto left = resolved.launch.time_left();
  return left && outputs.store && *left < stop.shutdown_budget.full_budget(outputs.store->current_save_duration());
}

void SessionState::stop_if_asked() {
  if (bad_numbers_watch) bad_numbers_watch->require_watched(models);
  // Inside join() the other workers may be at another boundary.
  if (std::any_of(models.begin(), models.end(), is_joined)) return;
  for (const auto& prepared : models)
    if (const auto reducer = prepared->reducer()) reducer->finish_abandoned_passes();
  std::int64_t averaged = 0;
  bool asked = false;
  for (const auto& prepared : models)
    if (const auto reducer = prepared->reducer()) {
      averaged += reducer->averaged_pass_count();
      asked = asked || reducer->any_stop_requested();
    }
  bool exchanged = true;
  if (std::exchange(stop.average_count, averaged) != averaged)
    stop.request.merge(asked);
  else
    exchanged = stop.request.exchange(workers.control, is_asked_to_stop());
  if (exchanged) {
    stop.shutdown_budget.reached_boundary();
    stop.shutdown_budget.left_boundary();
  }
  if (stop.request.is_known()) save_and_stop(false);
}

void SessionState::stop_if_asked_after_report(bool saved) {
  if (!stop.request.is_known()) return;
  if (!saved) return save_and_stop(true);
  outputs.wait_for_save();
  throw_stopped(true);
}

bool SessionState::should_stop() {
  require_training("asking whether to stop");
  stop.shutdown_budget.reached_boundary();
  if (!stop.request.is_known())
    stop.request.merge(workers.control.all_reduce(std::int64_t{is_asked_to_stop()}, ReduceOp::max) != 0);
  stop.shutdown_budget.left_boundary();
  return stop.user_was_told = stop.request.is_known();
}

Preemption SessionState::preemption() {
  require_training("asking for a preemption");
  stop.shutdown_budget.reached_boundary();
  constexpr auto never = std::numeric_limits<std::int64_t>::max();
  const auto left = resolved.launch.time_left();
  std::array<std::int64_t, 2> words{!(stop.request.is_known() || is_asked_to_stop()),
                                    left ? std::chrono::round<std::chrono::nanoseconds>(*left).count() : never};
  workers.control.all_reduce(std::span(words), ReduceOp::min);
  stop.request.merge(words[0] == 0);
  stop.shutdown_budget.left_boundary();
  stop.user_was_told = stop.request.is_known();
  return {.asked = stop.user_was_told,
          .time_left = words[1] == never ? std::nullopt : std::optional(std::chrono::nanoseconds(words[1]))};
}

void SessionState::end_if_callbacks_ask() {
  if (!stop.ended_by_callback) {
    stop.ended_by_callback =
        workers.control.all_reduce(std::int64_t{outputs.callbacks.should_stop()}, ReduceOp::max) != 0;
    if (!stop.ended_by_callback) return;
    if (workers.is_first())
      log::info("training ends after report " + std::to_string(counters.training_iteration) +
                ", as a callback has asked");
  }
  if (!stop.is_operator_run) throw TrainingEndedByCallback();
}

void SessionState::add_callback(std::shared_ptr<Callback> callback) {
  require_training("adding a callback");
  Session view(*this);
  outputs.callbacks.add(std::move(callback), view);
  end_if_already_done();
}

void SessionState::end_if_already_done() {
  if (start.checkpoint) end_if_callbacks_ask();
}

void SessionState::end_training() {
  outputs.wait_for_save();
  const auto& begun_from = start.checkpoint;
  const auto& newest = outputs.newest;
  stop.file.remove();
  if (bad_numbers_watch) bad_numbers_watch->warn_of_skipped_steps();
  if (stop.user_was_told) throw_stopped(newest && (!begun_from || newest->path() != begun_from->path()));
  if (stop.ended_by_callback || counters.steps->counts_epochs || counters.epoch_count > 0) return;
  if (const auto name = data.pass_positions->name_of_pass_not_resumed(/*in_loop=*/false); !name.empty())
    throw Error(
        ExitCode::user_error, "resuming the pass over \"" + name + "\"",
        "the run was saved in the middle of it, but the training function has ended without it: the session does not "
        "know the epochs, and the passes that were finished before it are empty now",
        "Loop over session.epochs(n), or call set_epoch(epoch) for each epoch");
}

void SessionState::save_and_stop(bool in_report) {
  outputs.wait_for_save_and_warn();
  const auto entries = stop.last_state.lock();
  const bool none_accumulated = has_no_accumulated_gradients(entries.get());
  std::array<std::int64_t, 5> everywhere{entries != nullptr, !stop.has_reported_files, has_position(), none_accumulated,
                                         may_wait_for_a_step()};
  workers.control.all_reduce(std::span(everywhere), ReduceOp::min);
  const auto [has_state, no_files, all_have_position, none_anywhere, all_may_wait] = everywhere;
  if (!has_state && (in_report || no_files)) throw_stopped(false);
  if (!has_state || !all_have_position || (!none_anywhere && all_may_wait)) return;
  if (!none_anywhere && workers.is_first())
    log::warn("accumulated gradients are not saved: no optimizer has stepped with them in the time that was left");
  for (const auto& prepared : models) prepared->synchronise_buffers();
  save(entries.get(), std::nullopt, false, Json::object());
  outputs.wait_for_save();
  throw_stopped(true);
}

/// True if a checkpoint can hold the position in the data.
bool SessionState::has_position() const {
  if (counters.steps->find_unresumable_pass() != nullptr) return false;
  return counters.is_between_epochs || counters.steps->find_unsaved_pass() == nullptr;
}

bool SessionState::may_wait_for_a_step() const {
  if (stop.boundaries_with_gradients > longest_accumulation) return false;
  const auto left = resolved.launch.time_left();
  return !left || !outputs.store || *left > stop.shutdown_budget.least_budget(outputs.store->current_save_duration());
}

bool SessionState::has_no_accumulated_gradients(const StateEntries* entries) {
  bool none_accumulated = *no_sync_depth == 0;
  std::set<const void*> known;
  for (const auto& prepared : models) {
    const auto reducer = prepared->reducer();
    if (!reducer) continue;
    // Not short-circuited: each reducer must see this boundary.
    none_accumulated = reducer->has_no_gradient_to_save() && none_accumulated;
    for (const auto& tensor : prepared->module()->parameters()) known.insert(tensor.unsafeGetTensorImpl());
  }
  std::vector<std::vector<at::Tensor>> others;
  if (entries != nullptr)
    for (const auto& [name, entry] : *entries) {
      others.emplace_back();
      for (const auto& [path, tensor] : entry.object()->parameters())
        if (!known.contains(tensor.unsafeGetTensorImpl())) others.back().push_back(tensor);
    }
  none_accumulated = !stop.accumulated.any(others) && none_accumulated;
  stop.boundaries_with_gradients = none_accumulated ? 0 : stop.boundaries_with_gradients + 1;
  return none_accumulated;
}

void SessionState::throw_stopped(bool saved) {
  stop.was_stopped = true;
  stop.file.remove();
  const auto& newest = outputs.newest;
  const auto remedy = "Start it again with --name " + run.name() + " to go on";
  const Error error = saved ? Error(ExitCode::stopped, "training",
                                    "stopped on request, state saved in " + newest->path().filename().string(), remedy)
                            : Error(ExitCode::retry, "training", "stopped on request, and there is no State to save",
                                    remedy + (newest ? " from " + newest->path().filename().string() : ""));
  throw Error(error.code(), std::string(error.what()));  // agreed: the same on all workers
}

}  // namespace muster::detail::session
