#include "session/stopper.hpp"

#include "base/log.hpp"
#include "muster/error.hpp"
#include "state/stateful.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace muster::detail::session {
namespace {

/// An estimate of the bytes that a save writes: the parameters, and as much for each of an optimizer's two moments.
double bytes_of(const StateEntries& entries) {
  double bytes = 0;
  for (const auto& [name, entry] : entries)
    for (const auto& [path, tensor] : entry.object()->parameters()) bytes += 3.0 * static_cast<double>(tensor.nbytes());
  return bytes;
}

}  // namespace

void Stopper::note_restored_state(const std::shared_ptr<const StateEntries>& entries) {
  note_state(entries);
  budget_.expect_save_bytes(bytes_of(*entries));
}

bool Stopper::is_asked_here() {
  if (launch_.stop_requested() || file_.exists()) return true;
  const auto left = launch_.time_left();
  return left && outputs_.store && *left < budget_.full_budget(outputs_.store->current_save_duration());
}

void Stopper::stop_if_asked() {
  // Inside join() the other workers may be at another boundary.
  if (models_.any_joined()) return;
  models_.finish_abandoned_passes();
  const auto averaged = models_.gradient_average_count();
  bool exchanged = true;
  if (std::exchange(average_count_, averaged) != averaged)
    request_.merge(models_.any_stop_requested());
  else
    exchanged = request_.exchange(workers_.control, is_asked_here());
  if (exchanged) {
    budget_.reached_boundary();
    budget_.left_boundary();
  }
  if (is_known()) save_and_stop(false);
}

void Stopper::stop_if_asked_after_report(ReportedNow report) {
  has_reported_files_ = has_reported_files_ || report.had_files;
  if (const auto cost = outputs_.store->last_save_duration()) budget_.note_save_duration(*cost);
  if (!is_known()) return;
  if (!report.saved) return save_and_stop(true);
  outputs_.wait_for_save();
  throw_stopped(true);
}

bool Stopper::should_stop() {
  budget_.reached_boundary();
  if (!is_known()) request_.merge(workers_.control.all_reduce(std::int64_t{is_asked_here()}, ReduceOp::max) != 0);
  budget_.left_boundary();
  return user_was_told_ = is_known();
}

Preemption Stopper::preemption() {
  budget_.reached_boundary();
  constexpr auto never = std::numeric_limits<std::int64_t>::max();
  const auto left = launch_.time_left();
  std::array<std::int64_t, 2> words{!(is_known() || is_asked_here()),
                                    left ? std::chrono::round<std::chrono::nanoseconds>(*left).count() : never};
  workers_.control.all_reduce(std::span(words), ReduceOp::min);
  request_.merge(words[0] == 0);
  budget_.left_boundary();
  user_was_told_ = is_known();
  return {.asked = user_was_told_,
          .time_left = words[1] == never ? std::nullopt : std::optional(std::chrono::nanoseconds(words[1]))};
}

void Stopper::end_training() {
  file_.remove();
  if (user_was_told_) throw_stopped(outputs_.has_saved);
}

void Stopper::save_and_stop(bool in_report) {
  outputs_.wait_for_save_and_warn();
  const auto entries = last_state_.lock();
  const bool none_accumulated = accumulated_.none(entries.get());
  std::array<std::int64_t, 5> everywhere{entries != nullptr, !has_reported_files_, progress_.has_position(),
                                         none_accumulated, may_wait_for_a_step()};
  workers_.control.all_reduce(std::span(everywhere), ReduceOp::min);
  const auto [has_state, no_files, all_have_position, none_anywhere, all_may_wait] = everywhere;
  if (!has_state && (in_report || no_files)) throw_stopped(false);
  if (!has_state || !all_have_position || (!none_anywhere && all_may_wait)) return;
  if (!none_anywhere && workers_.is_first())
    log::warn("accumulated gradients are not saved: no optimizer has stepped with them in the time that was left");
  models_.synchronise_buffers();
  saver_.save({.entries = entries.get(), .must_wait = true});
  outputs_.wait_for_save();
  throw_stopped(true);
}

bool Stopper::may_wait_for_a_step() const {
  if (accumulated_.last_too_long()) return false;
  const auto left = launch_.time_left();
  return !left || !outputs_.store || *left > budget_.least_budget(outputs_.store->current_save_duration());
}

void Stopper::throw_stopped(bool saved) {
  has_stopped_ = true;
  file_.remove();
  const auto& newest = outputs_.newest;
  const auto remedy = "Start it again with --name " + run_.name() + " to go on";
  const Error error = saved ? Error(ExitCode::stopped, "training",
                                    "stopped on request, state saved in " + newest->path().filename().string(), remedy)
                            : Error(ExitCode::retry, "training", "stopped on request, and there is no State to save",
                                    remedy + (newest ? " from " + newest->path().filename().string() : ""));
  throw Error(error.code(), std::string(error.what()));  // agreed: the same on all workers
}

}  // namespace muster::detail::session
