#include "base/log.hpp"
#include "comm/agreement.hpp"
#include "comm/on_ranks.hpp"
#include "comm/world.hpp"
#include "launch/supervised.hpp"
#include "train/failures.hpp"
#include "train/fit.hpp"
#include "train/open_session.hpp"

#include <thread>

namespace muster::detail::train {
namespace {

/// Ranks that do not train wait for as long as it takes.
constexpr std::chrono::hours as_long_as_it_takes{24 * 365};

/// What the training function has returned; or why it has ended by an exception, as far as that was no failure.
struct End {
  Json returned = {};
  bool stopped = false;                           ///< on request
  std::optional<BadSteps::Place> goes_back = {};  ///< to the newest checkpoint, for BadNumbers::roll_back
};

/// One attempt on one worker. An exception is told to all ranks at once, and leaves when backend and sinks are shut
/// down. Collective over the workers.
void attempt(const Plan& plan, const RunFolder& run, const Communicator& workers, const Communicator& control,
             at::Device device, const TrainLoop& train_loop, BadSteps& bad_steps, Validation& validation, End& end) {
  OpenSession session(plan, run, workers, control, device, bad_steps);
  if (validation.possible()) session.state().validation = &validation;
  try {
    session.open();
    try {
      session.state().end_if_known_done();
      end.returned = train_loop(session.view(), plan.options.train_loop_config);
    } catch (const TrainingEnded&) {
    }
    session.close();
    if (workers.rank() == 0) validation.training_has_ended();
  } catch (...) {
    // Before the session goes, and with it connections on which the others may be waiting.
    const auto cause = comm::caught(plan.world());
    comm::raise_alarm(plan.world(), cause);
    session.fail(cause);
    const auto& ended = session.state();
    end.stopped = ended.stop.stopped;
    if (ended.numbers) end.goes_back = ended.numbers->goes_back();
    throw;
  }
}

/// Waits before the next attempt, less where a stop is asked for: the attempt then ends as it does. Collective.
void pause_between(const Plan& plan, std::chrono::seconds time) {
  constexpr std::chrono::milliseconds slice{100};
  for (std::chrono::milliseconds waited{}; waited < time; waited += slice) {
    std::this_thread::sleep_for(slice);
    if (plan.world().all_reduce(std::int64_t{plan.launch.stop_requested()}, ReduceOp::max) != 0) return;
  }
}

/// That an attempt has failed, and what each worker says of it.
void tell_callbacks(const Plan& plan, std::map<int, std::string> errors) noexcept {
  if (!plan.works()) return;
  errors.erase(errors.lower_bound(plan.workers), errors.end());  // of ranks that only wait
  observe::tell_quietly(plan.options.run_config.callbacks,
                        [&](Callback& callback) { callback.after_exception(errors); });
}

/// Of this run: those that were in this process and, under `muster run`, in those before it. Rank 0 counts.
class FailureCount {
 public:
  FailureCount(const Communicator& world, const RunFolder& run) : world_(world), run_(run) {
    agree([&] {
      if (supervisor_) failures_ = read_failures(run_.path(), supervisor_->id).value_or(failures_);
    });
  }
  /// One more; whether it may be tried again here. Collective.
  bool add(int max_failures) {
    agree([&] {
      failures_ = one_more(failures_, run_.path());
      if (!supervisor_ || !failures_.may_retry(max_failures)) return;  // the job fails, which its supervisor counts
      try {
        write_failures(run_.path(), supervisor_->id, failures_);
      } catch (const std::exception& error) {
        log::warn(std::string("the number of failures is not kept: ") + error.what());
      }
    });
    return failures_.may_retry(max_failures);
  }
  const Failures& failures() const noexcept { return failures_; }

 private:
  template <class Work>
  void agree(Work&& work) {
    failures_.count = std::stoi(comm::on_root(world_, [&] { return work(), std::to_string(failures_.count); }));
  }

  const Communicator& world_;
  const RunFolder& run_;
  const std::optional<launch::Supervisor> supervisor_ = launch::supervisor();
  Failures failures_;
};

}  // namespace

Ended train_with_retries(const Plan& plan, const RunFolder& run, at::Device device, const TrainLoop& train_loop,
                         Validation& validation) {
  const auto& world = plan.world();
  const auto supervisor = launch::supervisor();
  const int max_failures = supervisor && supervisor->max_failures ? *supervisor->max_failures
                                                                  : plan.options.run_config.failure_config.max_failures;
  const bool rolls_back = plan.options.run_config.failure_config.bad_numbers == BadNumbers::roll_back;
  BadSteps bad_steps;
  for (FailureCount count(world, run);;) {
    const bool last = !count.failures().after({}).may_retry(max_failures);
    comm::WaitLimits limits{.done = plan.wait_limit, .failed = plan.wait_limit};
    if (!plan.works()) limits.done = as_long_as_it_takes;
    if (last) limits.failed = comm::final_grace(world);
    // A failed attempt leaves collectives half done, so each one has channels of its own.
    const auto workers = world.split(plan.works() ? 0 : 1);
    const auto control = workers.duplicate();
    End end;
    std::map<int, std::string> errors;
    validation.begin_attempt();
    const auto error = comm::attempt_on_all(
        world, limits,
        [&] {
          if (plan.works())
            attempt(plan, run, workers, control, device, train_loop, bad_steps, validation, end);
          else
            validation.serve();
        },
        &errors);
    if (!error) return {.returned = std::move(end.returned)};
    if (rolls_back && bad_steps.go_back(world, end.goes_back)) {
      if (world.rank() == 0) log::warn(error->what());
      continue;
    }
    if (error->code() != ExitCode::stopped && world.rank() == 0) run.write_error(error->what());
    if (error->code() == ExitCode::stopped) {
      if (world.rank() == 0) run.clear_error();  // of an earlier attempt
      return {.error = error};
    }
    // A stop at which nothing could be saved; ranks that only wait do not know of it.
    if (error->code() == ExitCode::retry && world.all_reduce(std::int64_t{end.stopped}, ReduceOp::max) != 0) {
      if (world.rank() == 0) launch::tell_supervisor(launch::telling_stopped, run.path().string());
      return {.error = error};
    }
    tell_callbacks(plan, std::move(errors));
    if (!may_help(error->code()) || !count.add(max_failures)) return {.error = error};
    const auto pause = back_off(count.failures());
    if (world.rank() == 0)
      log::warn(std::string(error->what()) + " — trying again from the newest checkpoint" +
                (pause.count() > 0 ? " in " + std::to_string(pause.count()) + " s" : "") + " (failure " +
                std::to_string(count.failures().count) +
                (max_failures > 0 ? " of " + std::to_string(max_failures) : "") + ")");
    pause_between(plan, pause);
  }
}

}  // namespace muster::detail::train
