#include "session/stopper.hpp"

#include "base/text.hpp"
#include "comm/on_ranks.hpp"
#include "launch/stop_signal.hpp"
#include "launch/supervised.hpp"
#include "muster/error.hpp"
#include "session/session_state.hpp"
#include "state/stateful.hpp"

#include <array>
#include <chrono>
#include <csignal>
#include <ctime>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace muster::detail::session {
namespace {

/// Estimates the bytes that a save writes: the parameters, and twice as much for the two moments of an optimizer.
double bytes_of(const StateEntries& entries) {
  double bytes = 0;
  for (const auto& [name, entry] : entries)
    for (const auto& [path, tensor] : entry.object()->parameters()) bytes += 3.0 * static_cast<double>(tensor.nbytes());
  return bytes;
}

std::string name_of_signal(int signal) {
  return signal == SIGUSR1   ? "SIGUSR1"
         : signal == SIGUSR2 ? "SIGUSR2"
         : signal == SIGHUP  ? "SIGHUP"
         : signal == SIGTERM ? "SIGTERM"
                             : str("signal ", signal);
}

/// Returns a text such as "90 min", in the largest unit in which the number is whole.
std::string text_of(std::chrono::milliseconds time) {
  const auto seconds = time.count() / 1000;
  if (seconds > 0 && seconds % 3600 == 0) return str(seconds / 3600, " h");
  return seconds > 0 && seconds % 60 == 0 ? str(seconds / 60, " min") : str(seconds, " s");
}

/// Returns the time of day at which `left` will be over, such as "14:00".
std::string clock_time_in(std::chrono::duration<double> left) {
  using std::chrono::system_clock;
  const auto time = system_clock::to_time_t(system_clock::now() + std::chrono::round<std::chrono::seconds>(left));
  std::tm local{};
  ::localtime_r(&time, &local);
  char text[8] = "";
  std::strftime(text, sizeof text, "%H:%M", &local);
  return text;
}

}  // namespace

void Stopper::note_restored_state(const std::shared_ptr<const StateEntries>& entries) {
  note_state(entries);
  budget_.expect_save_bytes(bytes_of(*entries));
}

bool Stopper::is_asked_here() {
  const auto left = session_.resolved.launch.time_left();
  const bool is_late = left && (left->count() <= 0 ||
                                (session_.outputs.store &&
                                 *left < budget_.full_budget(session_.outputs.store->background().current_duration())));
  if (!session_.resolved.launch.stop_requested() && !file_.exists() && !is_late) return false;
  if (cause_.empty()) cause_ = cause_of_stop(is_late ? left : std::nullopt);
  return true;
}

std::string Stopper::cause_of_stop(std::optional<std::chrono::duration<double>> left) {
  // muster run passes all signals on as the same signal, and logs itself why it stops the job.
  const int signal = launch::supervisor() ? 0 : launch::stop_signal::requested_by();
  if (signal != 0) return "by " + name_of_signal(signal);
  if (left && session_.resolved.launch.flags().time_limit)
    return "as the time limit of " + text_of(*session_.resolved.launch.flags().time_limit) + " ends";
  if (left) return "as the batch job ends at " + clock_time_in(*left);
  return file_.exists() ? "as the file stop is there" : "on request";
}

bool Stopper::stop_if_asked() {
  // Inside join(), the other workers may be at other boundaries.
  if (session_.models.any_joined()) return false;
  session_.models.finish_abandoned_rounds();
  const auto averaged = session_.models.gradient_average_count();
  const bool has_averaged = std::exchange(average_count_, averaged) != averaged;
  bool has_asked = false;
  if (has_averaged)
    request_.merge(session_.models.any_stop_requested());
  else
    has_asked = request_.exchange(session_.workers.control, is_asked_here());
  if (has_averaged || has_asked) {
    budget_.reached_boundary();
    budget_.left_boundary();
  }
  if (is_known()) save_and_stop({});
  return has_asked;
}

void Stopper::stop_if_asked_after_report(FinishedReport report) {
  has_reported_checkpoint_ = has_reported_checkpoint_ || report.had_checkpoint;
  if (const auto cost = session_.outputs.store->background().last_duration())
    budget_.note_save_duration(session_.saver.last_collect_duration() + *cost);
  if (!is_known()) return;
  // state.restore() cannot resume from a checkpoint that only has files, so save a State before stopping.
  if (!report.saved || !report.had_state) return save_and_stop(report);
  try {
    session_.outputs.wait_for_save();
  } catch (...) {
    session_.attempt_end->end_with_current();
  }
  throw_stopped(true);
}

bool Stopper::should_stop() {
  budget_.reached_boundary();
  if (!is_known())
    request_.merge(session_.workers.control.all_reduce(std::int64_t{is_asked_here()}, ReduceOp::max) != 0);
  budget_.left_boundary();
  return user_was_told_ = is_known();
}

Preemption Stopper::preemption() {
  budget_.reached_boundary();
  constexpr auto never = std::numeric_limits<std::int64_t>::max();
  const auto left = session_.resolved.launch.time_left();
  std::array<std::int64_t, 2> words{!(is_known() || is_asked_here()),
                                    left ? std::chrono::round<std::chrono::nanoseconds>(*left).count() : never};
  session_.workers.control.all_reduce(std::span(words), ReduceOp::min);
  request_.merge(words[0] == 0);
  budget_.left_boundary();
  user_was_told_ = is_known();
  return {.asked = user_was_told_,
          .time_left = words[1] == never ? std::nullopt : std::optional(std::chrono::nanoseconds(words[1]))};
}

void Stopper::end_training() {
  file_.remove();
  if (!user_was_told_) return;
  // If another worker has left the training function by an exception, that is the cause of the end; this call then
  // throws it.
  comm::wait_for_all(session_.workers.control);
  throw_stopped(session_.outputs.has_saved);
}

void Stopper::save_and_stop(std::optional<FinishedReport> report) try {
  const bool has_saved = report && report->saved;
  if (has_saved)
    session_.outputs.wait_for_save();
  else
    session_.outputs.wait_for_save_and_warn();
  const auto entries = last_state_.lock_on_all(session_.workers.control);
  std::array<std::int64_t, 3> everywhere{entries != nullptr, !has_reported_checkpoint_,
                                         session_.progress.has_position()};
  session_.workers.control.all_reduce(std::span(everywhere), ReduceOp::min);
  const auto [has_state, none_reported, all_have_position] = everywhere;
  if (!has_state && (report || none_reported)) throw_stopped(has_saved);
  // At a report, do not wait for a step: other checkpoints of reports are saved at such a place, too, so the program
  // can resume there.
  if (!has_state || !all_have_position || (!report && must_wait_for_a_step())) return;
  session_.models.synchronise_statistics();
  session_.saver.save({.entries = entries.get(), .must_wait = true});
  session_.outputs.wait_for_save();
  throw_stopped(true);
} catch (...) {
  session_.attempt_end->end_with_current();  // even if the save has failed, the attempt ends here
}

bool Stopper::must_wait_for_a_step() {
  std::array<std::int64_t, 2> everywhere{session_.gradients.none(), may_wait_for_a_step()};
  session_.workers.control.all_reduce(std::span(everywhere), ReduceOp::min);
  const auto [none_anywhere, all_wait] = everywhere;
  return none_anywhere == 0 && all_wait != 0;
}

bool Stopper::may_wait_for_a_step() const {
  if (session_.gradients.have_lasted_too_long()) return false;
  const auto left = session_.resolved.launch.time_left();
  return !left || !session_.outputs.store ||
         *left > budget_.least_budget(session_.outputs.store->background().current_duration());
}

void Stopper::throw_stopped(bool saved) {
  has_stopped_ = true;
  file_.remove();
  // Every worker that was asked to stop knows why. The first of these gives the text to all.
  const auto teller = static_cast<int>(session_.workers.control.all_reduce(
      std::int64_t{cause_.empty() ? session_.workers.size() : session_.workers.rank()}, ReduceOp::min));
  const auto stopped =
      "stopped " + (teller < session_.workers.size() ? session_.workers.control.broadcast(cause_, teller)
                                                     : std::string("on request"));
  const auto& newest = session_.outputs.newest;
  const auto& remedy = session_.run.how_to_go_on();
  const Error error = saved ? Error(ExitCode::stopped, "training",
                                    stopped + ", state saved in " + newest->path().filename().string(), remedy)
                            : Error(ExitCode::retry, "training", stopped + ", and there is no State to save",
                                    remedy + (newest ? " from " + newest->path().filename().string() : ""));
  // An Error without a rank, since it is the same on all workers.
  session_.attempt_end->end_with(Error(error.code(), std::string(error.what())));
}

}  // namespace muster::detail::session
