#include "session/validator.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "checkpoint/inspect.hpp"
#include "comm/agreement.hpp"
#include "comm/make_world.hpp"
#include "comm/mpi_scope.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/on_ranks.hpp"
#include "comm/rank_status.hpp"
#include "comm/timeout.hpp"
#include "muster/trainer.hpp"
#include "observe/metrics.hpp"
#include "session/session_state.hpp"
#include "storage/tier.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

namespace muster::detail::session {
namespace {

using namespace std::chrono_literals;
using storage::tier_of;

/// Added to a validation's timeout: time to notice that the validation was given up, and to write the result.
constexpr auto end_allowance = 30s;
/// Time that must be left for the end of the run after the last validation.
constexpr auto time_reserve = 1s;

/// How long to wait for a validation to end by itself, before and after the other ranks were told that it is given up.
/// Twice as long, for its thread to notice that its work was given up.
constexpr auto moment = 1s;

/// Returns an object with null for each metric that another validation of this run has given and that `reported` does
/// not have.
Json earlier_names_as_null(const storage::Tier& tier, const Json& reported) {
  Json nulls = Json::object();
  for (const auto& [index, path] : tier.list().published)
    if (const auto fields = checkpoint::read_validation(path))
      for (const auto& [name, value] : fields->items())
        if (!reported.contains(name)) nulls[name] = nullptr;
  return nulls;
}

/// Calls the user's validation function. Returns the mean of its metrics over the ranks. Collective over context.ranks.
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
    // Tell the other ranks first: the backend's shutdown closes connections on which they may be waiting.
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

Validator::Outcome validate(const ValidationContext& context, const std::filesystem::path& checkpoint) {
  Validator::Outcome outcome;
  try {
    const auto timeout = comm::timeout(context.ranks);
    // If a rank fails, the others notice it at their next collective.
    outcome.error = comm::attempt_on_all(context.ranks, {.done = timeout, .failed = timeout},
                                         [&] { outcome.metrics = measure(context, checkpoint); });
  } catch (...) {
    const auto lost = comm::current_outcome();
    outcome.error = Error(lost.code, lost.text);
    outcome.is_in_step = false;
  }
  return outcome;
}

/// Makes the process exit with main's exit code, but without the destructors of static objects: a detached thread may
/// still run then and use these objects.
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

std::string ValidationResult::to_text() const {
  return json_text_lossy(Json{
      {"index", of.index}, {"training_iteration", of.training_iteration}, {"fields", fields}, {"warning", warning}});
}

ValidationResult ValidationResult::from_text(const std::string& text) {
  const auto json = json_from_text(text);
  return {.of = {json.at("index").get<int>(), json.at("training_iteration").get<std::int64_t>()},
          .fields = json.at("fields"),
          .warning = json.at("warning").get<std::string>()};
}

std::shared_ptr<const ValidationContext> Validator::make_context(const Communicator& ranks) const {
  const auto own_world = comm::make_separate_world(ranks);
  if (comm::threads_may_call_mpi()) comm::set_timeout(own_world, resolved_->options.validation.timeout);
  return std::make_shared<ValidationContext>(ValidationContext{resolved_, run_, device_, own_world});
}

std::filesystem::path Validator::path_of(int index) const { return tier_of(run_->path())->published(index); }

std::vector<PendingValidation> Validator::pending(const UpdateRow& update_row,
                                                  const std::vector<checkpoint::Rollback>& rollbacks) const {
  std::vector<PendingValidation> pending;
  for (const auto& [index, path] : tier_of(run_->path())->list().published) try {
      if (checkpoint::is_rolled_back(rollbacks, index)) continue;  // its row now belongs to another report
      const auto reported = checkpoint::read_manifest(path).metrics;
      if (checkpoint::status_from(reported) != CheckpointStatus::pending_validation) continue;
      const auto iteration = reported.value("training_iteration", std::int64_t{0});
      if (const auto found = checkpoint::read_validation(path))
        update_row(iteration, *found);
      else
        pending.push_back({index, iteration});
    } catch (const Error& error) {
      log::warn("looking whether " + path.filename().string() + " waits for a validation: " + error.what());
    }
  return pending;
}

void Validator::begin(const std::shared_ptr<const ValidationContext>& context, int index) {
  leave();
  const auto path = path_of(index);
  std::packaged_task<Outcome()> task([context, path] { return validate(*context, path); });
  auto outcome = task.get_future().share();
  context_ = context;
  time_ = comm::WaitTime();
  ran_ = {};
  if (comm::threads_may_call_mpi()) {
    thread_ = std::thread(std::move(task));
  } else {
    const auto begun = Clock::now();
    task();
    ran_ = Clock::now() - begun;
    time_ = comm::WaitTime();
  }
  outcome_ = std::move(outcome);
}

void Validator::leave() noexcept {
  if (!is_running()) return;
  // If the validation has ended on another rank, only a last message is on its way here, so wait for a moment.
  const bool is_given_up = outcome_.wait_for(moment) != std::future_status::ready && give_up();
  if (thread_.joinable()) thread_.join();
  if (is_given_up || !outcome_.get().is_in_step) is_stuck_ = true;
  outcome_ = {};
  context_.reset();
}

bool Validator::give_up() noexcept {
  try {
    comm::raise_alarm(context_->ranks, {.kind = comm::Outcome::Kind::failed,
                                        .code = ExitCode::retry,
                                        .text = "the validation was given up",
                                        .stalled = true});
    // The other ranks may all have ended and wait for the last messages. If it ends now, it is still in step.
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

void Validator::keep_others_waiting() const {
  comm::keep_alive(resolved_->world(), resolved_->options.validation.timeout + end_allowance);
}

Validator::Decision Validator::decide(bool at_the_end) const {
  if (is_over()) return Decision::finished;
  if (elapsed() >= resolved_->options.validation.timeout) return Decision::timed_out;
  if (!at_the_end) return Decision::keep_running;
  const auto left = resolved_->launch.time_left();
  return (left ? *left < time_reserve : resolved_->launch.stop_requested()) ? Decision::out_of_time
                                                                            : Decision::keep_running;
}

bool Validator::may_begin(bool asked_to_stop) const {
  const auto left = resolved_->launch.time_left();
  if (!left) return !asked_to_stop && !resolved_->launch.stop_requested();
  return *left > slowest_ + time_reserve && (!asked_to_stop || slowest_ > Clock::duration{});
}

ValidationResult Validator::write_result(const PendingValidation& of, Decision decision) {
  const auto path = path_of(of.index);
  const auto name = path.filename().string();
  ValidationResult found{.of = of};
  if (decision == Decision::out_of_time) {
    found.warning = name + " is not validated yet; started again, the run does it";
    return found;
  }
  const auto& timeout = resolved_->options.validation.timeout;
  try {
    Json fields = Json::object();
    auto status = CheckpointStatus::validated;
    if (decision == Decision::finished && !outcome_.get().error) {
      fields = outcome_.get().metrics;
      slowest_ = std::max(slowest_, elapsed());
    } else {
      const bool timed_out = elapsed() >= timeout;
      status = timed_out ? CheckpointStatus::validation_timeout : CheckpointStatus::validation_failed;
      found.warning = "validating " + name + ": ";
      if (decision == Decision::finished)
        found.warning += outcome_.get().error->what();
      else
        found.warning += str("given up after ", timeout.count(),
                             " ms (ValidationConfig::timeout); its ranks validate nothing more in this job");
      fields = earlier_names_as_null(*tier_of(run_->path()), checkpoint::read_manifest(path).metrics);
    }
    fields[checkpoint::status_name] = checkpoint::text_of(status);
    checkpoint::write_validation(path, fields);
    found.fields = std::move(fields);
  } catch (const std::exception& error) {
    found.warning += (found.warning.empty() ? "" : ". And ") +
                     ("what the validation of " + name + " has found is not kept: ") + error.what();
  }
  return found;
}

}  // namespace muster::detail::session
