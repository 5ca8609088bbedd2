#include "session/validation_job.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "base/option_json.hpp"
#include "checkpoint/inspect.hpp"
#include "comm/agreement.hpp"
#include "comm/mpi_scope.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/on_ranks.hpp"
#include "comm/time_limit.hpp"
#include "muster/trainer.hpp"
#include "observe/metrics.hpp"
#include "session/session_state.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

namespace muster {

Metrics ValidationFunction::to_metrics(const Config& values) {
  if (!values.is_object())
    throw Error(ExitCode::user_error, "validating a checkpoint", "the function's return value is not a JSON object",
                "Give names and values, as {{\"val_loss\", 0.1}}");
  Metrics metrics;
  for (const auto& [name, value] : values.items()) metrics.emplace(name, value);
  return metrics;
}

template <>
constexpr bool detail::option_json::is_data<ValidationFunction> = false;
MUSTER_OPTIONS(ValidationConfig, function, timeout)

}  // namespace muster

namespace muster::detail::session {
namespace {

using namespace std::chrono_literals;

/// How long a thread may take to notice that its validation was given up.
constexpr auto moment = 1s;

/// Calls the user's function. Collective over the ranks.
Json measure(const ValidationContext& context, const std::filesystem::path& path) {
  const auto& resolved = *context.resolved;
  at::set_num_threads(resolved.threads_per_worker);
  const c10::DeviceGuard device(context.device);
  const at::NoGradGuard no_gradients;
  const auto checkpoint = Checkpoint::from_directory(path);
  SessionState state(resolved, *context.run, context.ranks, context.device, checkpoint);
  state.workers.seed_generators();
  state.data.prepare_preprocessor(checkpoint::preprocessor_state(path), true, state.workers.control);
  Session session(state);
  const std::shared_ptr<Backend> backend =
      resolved.backend ? resolved.backend->make_backend() : std::make_unique<Backend>();
  backend->on_start(session);
  std::vector<Json> of_ranks;
  try {
    const auto metrics = resolved.options.validation.function(session, checkpoint);
    comm::stay_if_left_behind(context.ranks);
    const auto mine = json_to_cbor(observe::to_json(metrics));
    for (const auto& bytes : state.workers.control.all_gather(mine)) of_ranks.push_back(json_from_cbor(bytes));
  } catch (...) {
    comm::stay_if_left_behind(context.ranks);
    // Before the backend shuts down and closes connections on which other ranks may be waiting.
    comm::raise_alarm(context.ranks, comm::current_outcome(context.ranks));
    state.has_failed = true;
    try {
      backend->on_shutdown(session);
    } catch (...) {
      log::warn("shutting down the backend after a validation: " + comm::current_outcome().text);
    }
    throw;
  }
  backend->on_shutdown(session);
  return observe::mean_over_ranks(of_ranks);
}

ValidationJob::Outcome validate(const ValidationContext& context, const std::filesystem::path& checkpoint) {
  ValidationJob::Outcome outcome;
  try {
    const auto limit = comm::time_limit(context.ranks);
    // If one rank has failed, the others go on until their next collective.
    outcome.error = comm::attempt_on_all(context.ranks, {.done = limit, .failed = limit},
                                         [&] { outcome.metrics = measure(context, checkpoint); });
  } catch (...) {
    const auto lost = comm::current_outcome();
    outcome.error = Error(lost.code, lost.text);
    outcome.is_in_step = false;
  }
  return outcome;
}

/// A detached thread may still run when main has returned. So the process exits with main's exit code before objects
/// that the thread uses are destroyed.
void leave_without_destructors() noexcept {
  static const int once = ::on_exit(
      [](int status, void*) {
        log::flush();
        std::fflush(nullptr);
        ::_exit(status);
      },
      nullptr);
  static_cast<void>(once);
}

}  // namespace

ValidationJob::ValidationJob(std::shared_ptr<const ValidationContext> context, const std::filesystem::path& checkpoint)
    : context_(std::move(context)) {
  std::packaged_task<Outcome()> task([context = context_, checkpoint] { return validate(*context, checkpoint); });
  outcome_ = task.get_future().share();
  if (comm::threads_may_call_mpi()) {
    thread_ = std::thread(std::move(task));
  } else {
    const auto begun = Clock::now();
    task();
    ran_ = Clock::now() - begun;
    time_ = comm::WaitTime();
  }
}

ValidationJob::~ValidationJob() { static_cast<void>(leave()); }

bool ValidationJob::leave() noexcept {
  // If the job is over on another rank, only its last message is still missing here.
  if (!is_given_up_ && outcome_.wait_for(moment) != std::future_status::ready) is_given_up_ = give_up();
  if (thread_.joinable()) thread_.join();
  return !is_given_up_ && outcome_.get().is_in_step;
}

bool ValidationJob::give_up() noexcept {
  try {
    comm::raise_alarm(context_->ranks, {.kind = comm::Outcome::Kind::failed,
                                        .code = ExitCode::retry,
                                        .text = "the validation was given up",
                                        .stalled = true});
    // It may be over on all other ranks, and wait for their last message: then it is in step.
    if (outcome_.wait_for(moment) == std::future_status::ready) return false;
    comm::give_up_work(context_->ranks);
    if (outcome_.wait_for(2 * moment) == std::future_status::ready) return true;
  } catch (...) {
    log::warn("giving up a validation: " + comm::current_outcome().text);
  }
  comm::leave_thread_behind(context_->ranks);
  leave_without_destructors();
  thread_.detach();
  return true;
}

}  // namespace muster::detail::session
