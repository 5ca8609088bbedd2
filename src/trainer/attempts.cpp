#include "base/json.hpp"
#include "base/log.hpp"
#include "comm/agreement.hpp"
#include "comm/on_ranks.hpp"
#include "comm/timeout.hpp"
#include "launch/supervised.hpp"
#include "node/call.hpp"
#include "run/failures.hpp"
#include "run/needs_new_job.hpp"
#include "session/open_session.hpp"
#include "session/same_passes.hpp"
#include "trainer/fit.hpp"

#include <thread>

namespace muster::detail::trainer {
namespace {

/// How an attempt has ended on this worker.
struct AttemptOnWorker {
  Json return_value = {};  ///< the training function's return value
  bool stopped = false;    ///< true if it was stopped on request
  /// The step with bad gradients because of which training goes back to the newest checkpoint; none if there is no such
  /// step.
  std::optional<session::BadSteps::OptimizerStepId> rollback_step = {};
  bool calls_differ = false;   ///< true if this worker has found that another worker is in a different collective call
  bool needs_new_job = false;  ///< true if no other attempt in this job can succeed
  Json passes = Json::object();  ///< SamePasses::noted() on this worker, if the attempt has failed
};

/// True if the exception that is being handled is of this type. Call it in a catch block.
template <class Exception>
bool handles() {
  try {
    throw;
  } catch (const Exception&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// Runs one attempt on one worker. On an exception, raises the alarm on all ranks at once, shuts down backend and
/// observers, and rethrows. Collective over the workers.
void attempt(const run::ResolvedOptions& resolved, const run::RunFolder& run, const Communicator& workers,
             const Communicator& control, at::Device device, const TrainLoop& train_loop, session::BadSteps& bad_steps,
             session::Validation& validation, AttemptOnWorker& end) {
  session::OpenSession session(resolved, run, workers, control, device, bad_steps);
  if (validation.is_configured()) session.state().outputs.validation = &validation;
  try {
    session.open();
    try {
      session.state().end_if_already_done();
      session.run([&] { end.return_value = train_loop(session.user_session(), resolved.options.train_loop_config); });
    } catch (const session::TrainingEndedByCallback&) {
    }
    session.close();
    if (workers.rank() == 0) validation.training_has_ended();
  } catch (...) {
    // Raise the alarm first: ending the session closes connections on which other ranks may be waiting.
    const auto cause = comm::current_outcome(resolved.world());
    comm::raise_alarm(resolved.world(), cause);
    session.fail(cause);
    const auto& ended = session.state();
    end.calls_differ = handles<node::CallMismatch>();
    end.needs_new_job = handles<run::NeedsNewJob>();
    end.passes = ended.same_passes.noted();
    end.stopped = ended.stopper.has_stopped();
    if (ended.bad_numbers) end.rollback_step = ended.bad_numbers->rollback_step();
    throw;
  }
}

/// Workers whose passes have different options soon make different collective calls. If a worker has noticed different
/// calls and the options differ, returns an Error that names the option; otherwise returns `error`. Collective.
Error with_cause_in_passes(const Communicator& world, const AttemptOnWorker& end, const Error& error) {
  if (world.all_reduce(std::int64_t{end.calls_differ}, ReduceOp::max) == 0) return error;
  std::vector<Json> of_ranks;
  for (const auto& text : world.all_gather(json_text_lossy(end.passes))) of_ranks.push_back(json_from_text(text));
  try {
    session::require_same_passes(of_ranks);
  } catch (const Error& difference) {
    return difference;
  }
  return error;
}

/// True if any rank was asked to stop. Collective.
bool is_asked_to_stop(const run::ResolvedOptions& resolved) {
  return resolved.world().all_reduce(std::int64_t{resolved.launch.stop_requested()}, ReduceOp::max) != 0;
}

/// Waits for `time` before the next attempt. Returns false as soon as any rank was asked to stop. Collective.
bool pause(const run::ResolvedOptions& resolved, std::chrono::seconds time) {
  constexpr std::chrono::milliseconds slice{100};
  for (std::chrono::milliseconds waited{}; !is_asked_to_stop(resolved); waited += slice) {
    if (waited >= time) return true;
    std::this_thread::sleep_for(slice);
  }
  return false;
}

/// Returns the Error for a run that was asked to stop between two attempts: one with ExitCode::stopped if there is a
/// checkpoint, which has the state; otherwise one with ExitCode::retry. But if the last attempt has ended with
/// ExitCode::retry (for example since it could not save), returns its `error`. Collective.
Error stopped_between_attempts(const run::ResolvedOptions& resolved, const run::RunFolder& run, const Error& error) {
  if (error.code() == ExitCode::retry) return error;
  if (resolved.world().rank() == 0) log::warn(error.what());
  const bool is_saved = comm::run_on_root(resolved.world(), [&] {
    const bool has_checkpoint = run::newest_checkpoint_index(run.path()) >= 0;
    if (!has_checkpoint) launch::tell_supervisor(launch::message_stopped, run.path().string());
    return has_checkpoint;
  });
  const auto& remedy = run.how_to_go_on();
  return is_saved ? Error(ExitCode::stopped, "training",
                          "stopped on request before the next attempt; the newest checkpoint has the state", remedy)
                  : Error(ExitCode::retry, "training",
                          "stopped on request before the next attempt, and there is no checkpoint", remedy);
}

/// Tells the callbacks that an attempt has failed. `errors`: by rank.
void tell_callbacks(const run::ResolvedOptions& resolved, std::map<int, std::string> errors) noexcept {
  if (!resolved.is_worker()) return;
  errors.erase(errors.lower_bound(resolved.worker_count), errors.end());  // leaves out the ranks that do not train
  observe::tell_and_log_errors("an exception", resolved.options.run_config.callbacks,
                               [&](Callback& callback) { callback.after_exception(errors); });
}

/// Counts the failures of this run in this process and, with `muster run`, in earlier processes. Rank 0 counts.
class FailureCount {
 public:
  FailureCount(const Communicator& world, const run::RunFolder& run) : world_(world), run_(run) {
    do_on_root([&] {
      if (supervisor_) failures_ = run::read_failures(run_.path(), supervisor_->id).value_or(failures_);
    });
  }
  /// Counts a failure. True if this process may try again. Collective.
  bool add(int max_failures) {
    do_on_root([&] {
      failures_ = run::add_failure(failures_, run_.path());
      // The supervisor itself counts the failure that ends the job.
      if (!supervisor_ || !failures_.may_retry(max_failures)) return;
      try {
        run::write_failures(run_.path(), supervisor_->id, failures_);
      } catch (const std::exception& error) {
        log::warn(str("the number of failures could not be saved: ", error.what()));
      }
    });
    return failures_.may_retry(max_failures);
  }
  const run::Failures& failures() const noexcept { return failures_; }

 private:
  template <class Work>
  void do_on_root(Work&& work) {
    failures_.count = comm::run_on_root(world_, [&] { return work(), failures_.count; });
  }

  const Communicator& world_;
  const run::RunFolder& run_;
  const std::optional<launch::Supervisor> supervisor_ = launch::supervisor();
  run::Failures failures_;
};

}  // namespace

TrainingOutcome train_with_retries(const run::ResolvedOptions& resolved, const run::RunFolder& run, at::Device device,
                                   const TrainLoop& train_loop, session::Validation& validation) {
  const auto& world = resolved.world();
  const auto supervisor = launch::supervisor();
  const int max_failures = supervisor && supervisor->max_failures
                               ? *supervisor->max_failures
                               : resolved.options.run_config.failure_config.max_failures;
  const bool rolls_back = resolved.options.run_config.failure_config.bad_numbers == BadNumbers::roll_back;
  session::BadSteps bad_steps;
  for (FailureCount count(world, run);;) {
    const bool last = !count.failures().with_one_more({}).may_retry(max_failures);
    comm::Timeouts timeouts{.done = resolved.timeout, .failed = resolved.timeout};
    if (!resolved.is_worker()) timeouts.done = session::Validator::as_long_as_it_takes;
    if (last) timeouts.failed = comm::final_grace(world);
    // A failed attempt may leave collectives unfinished, so each attempt has communicators of its own.
    const auto workers = world.split(resolved.is_worker() ? 0 : 1);
    const auto control = workers.duplicate();
    AttemptOnWorker end;
    std::map<int, std::string> errors;
    validation.begin_attempt();
    auto error = comm::attempt_on_all(
        world, timeouts,
        [&] {
          if (resolved.is_worker())
            attempt(resolved, run, workers, control, device, train_loop, bad_steps, validation, end);
          else
            validation.serve();
        },
        &errors);
    if (!error) return {.return_value = std::move(end.return_value)};
    error = with_cause_in_passes(world, end, *error);
    if (rolls_back && bad_steps.agree_to_roll_back(world, end.rollback_step)) {
      if (world.rank() == 0) log::warn(error->what());
      continue;
    }
    if (error->code() != ExitCode::stopped && world.rank() == 0) run.write_error(error->what());
    if (error->code() == ExitCode::stopped) {
      if (world.rank() == 0) run.clear_error();  // an earlier attempt may have written it
      return {.error = error};
    }
    // The workers were stopped and could not save anything. Ranks that do not train learn of it here.
    if (error->code() == ExitCode::retry && world.all_reduce(std::int64_t{end.stopped}, ReduceOp::max) != 0) {
      if (world.rank() == 0) launch::tell_supervisor(launch::message_stopped, run.path().string());
      return {.error = error};
    }
    tell_callbacks(resolved, std::move(errors));
    // `muster run` counts the failure that ends a job.
    const bool ends_job = world.all_reduce(std::int64_t{end.needs_new_job}, ReduceOp::max) != 0;
    if (ends_job || !is_worth_retrying(error->code()) || !count.add(max_failures)) return {.error = error};
    if (is_asked_to_stop(resolved)) return {.error = stopped_between_attempts(resolved, run, *error)};
    const auto time = run::retry_delay(count.failures());
    if (world.rank() == 0)
      log::warn(str(error->what(), " — trying again from the newest checkpoint",
                    time.count() > 0 ? str(" in ", time.count(), " s") : "", " (failure ", count.failures().count,
                    max_failures > 0 ? str(" of ", max_failures) : "", ")"));
    if (!pause(resolved, time)) return {.error = stopped_between_attempts(resolved, run, *error)};
  }
}

}  // namespace muster::detail::trainer
