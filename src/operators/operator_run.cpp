#include "operators/operator_run.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "checkpoint/merge.hpp"
#include "comm/agreement.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"
#include "run/failures.hpp"
#include "trainer/fit.hpp"

#include <ATen/detail/CUDAHooksInterface.h>

#include <chrono>
#include <exception>

namespace muster::detail::operators {
namespace {

/// Timeout of ranks that do not train: longer than any call takes.
constexpr std::chrono::hours no_timeout{24 * 365};

bool choose_gpu(UseGpu option, const Communicator& world) {
  if (option != UseGpu::automatic) return option == UseGpu::always;
  return world.all_reduce(std::int64_t{at::detail::getCUDAHooks().deviceCount() > 0}, ReduceOp::min) != 0;
}

/// Resolves the options of the trainer. Collective over the launch.
run::ResolvedOptions resolve(const Launch& launch, const OperatorTrainerOptions& options) {
  const auto& world = launch.communicator();
  if (options.initialization_hook)
    comm::check_on_all(world, {.done = comm::timeout(world), .failed = comm::final_grace(world)},
                       options.initialization_hook);
  const auto frequency = options.scheduler_step_freq;
  comm::require_same_options(world, "the operator's trainer",
                             {{"use_gpu", static_cast<int>(options.use_gpu)},
                              {"wrap_ddp", options.wrap_ddp},
                              {"use_fp16", options.use_fp16},
                              {"add_dist_sampler", options.add_dist_sampler},
                              {"scheduler_step_freq", frequency ? Json(static_cast<int>(*frequency)) : Json()}});
  auto resolved = run::resolve(
      launch,
      {.train_loop_config = options.config,
       .torch_config = {.backend = options.backend, .timeout = options.timeout},
       .scaling_config = {.num_workers = options.num_workers.most() ? options.num_workers : 1,
                          .use_gpu = choose_gpu(options.use_gpu, world),
                          .threads_per_worker = options.num_cpus_per_worker},
       .dataset_config = {.datasets_to_split = std::vector<std::string>()},  // OperatorLoader decides for its data
       .run_config = {.checkpoint_config = {.num_to_keep = 2, .async_save = saves_checkpoints(launch.flags())}}},
      trainer::torch_backend({.backend = options.backend, .timeout = options.timeout}));
  if (!options.use_tqdm) resolved.progress = Progress::none;
  resolved.first_epoch = 1;
  const int waiting = launch.size() - resolved.worker_count;
  if (!options.num_workers.most() && !launch.flags().workers && waiting > 0 && launch.rank() == 0)
    log::warn(str("one rank trains and ", waiting, waiting == 1 ? " waits" : " wait",
                  ": num_workers is 1 unless given. Write .num_workers = launch.size() to train on all"));
  return resolved;
}

}  // namespace

OperatorRun::OperatorRun(Launch& launch, const OperatorWorker::Make& make, const OperatorTrainerOptions& options)
    : resolved_(resolve(launch, options)),
      run_(launch.communicator(), launch, resolved_.options.run_config, launch.next_trainer_number()),
      everywhere_(launch.communicator(), resolved_.timeout),
      params_before_(run_.params()) {
  const auto& world = resolved_.world();
  const auto device = trainer::check_device_and_data(resolved_);
  const auto config_before = params_before_.is_object() ? params_before_.value("train_loop_config", Json()) : Json();
  trainer::begin_run(resolved_, run_);
  update_params(world, run_, TrainOptions{}.max_retries);
  const auto workers = world.split(resolved_.is_worker() ? 0 : 1);
  try {
    history_.restore(run([&] {
      worker_ = std::make_unique<OperatorWorker>(resolved_, run_, workers, device, history_);
      worker_->open(make, options);
      return history_.text();
    }));
  } catch (const Error& error) {
    if (run::is_refusal(error.code())) restore_params();
    throw;
  }
  if (!history_.empty() && !config_before.is_null() && config_before != resolved_.options.train_loop_config &&
      world.rank() == 0)
    log::warn(str("the run ", run_.path(), " goes on with another configuration: the first ", history_.size(),
                  " calls of the trainer return their saved results. Choose another --name to begin anew"));
}

OperatorRun::~OperatorRun() {
  if (!is_open_) return;
  if (comm::mpi_is_finalised()) {  // then the launch may be gone, too
    log::warn("the trainer of the run " + run_.path().string() +
              " was not shut down before the launch ended, so the run is not marked as finished. Call "
              "shutdown(), or let the trainer end, inside Launch::run()");
    return;
  }
  try {
    shutdown(std::uncaught_exceptions() > exceptions_);
  } catch (...) {
    const auto cause = comm::current_outcome();
    comm::raise_alarm(resolved_.world(), cause);  // makes Launch::run() end with this error
    if (worker_ && is_open_) worker_->session().fail(cause);
  }
}

void OperatorRun::restore_params() noexcept {
  if (params_before_.is_object() && resolved_.world().rank() == 0) run_.restore_params(params_before_);
}

void OperatorRun::refuse_calls(const std::string& fact) {
  if (resolved_.world().rank() == 0) run_.write_error("resuming the run " + run_.path().string() + ": " + fact);
  restore_params();
  throw Error(ExitCode::usage, "resuming the run " + run_.path().string(), fact,
              "Make the same calls in the same order, or choose another --name");
}

Json OperatorRun::replay(Call call, const CallRecord& before) {
  history_.advance();
  if (history_.next() == nullptr && worker_) worker_->end_replay();
  if (before.call == call && before.refusal) throw *before.refusal;
  if (before.call == call) return before.result;
  refuse_calls(str("call ", history_.position(), " of the trainer is ", name_of(call), "() and was ",
                   name_of(before.call), "() before the run was resumed"));
}

Json OperatorRun::run_or_replay(Call call, const Check& check, const Work& work) {
  require_open();
  if (const auto* const before = history_.next()) return replay(call, *before);
  const auto refusal = attempt([&] {
    if (check) check(*worker_);
  });
  if (refusal) {
    history_.add({.call = call, .refusal = refusal});
    history_.advance();
    throw *refusal;
  }
  // Workers add the result to the history before they save their state. The add() below is for the ranks that do not
  // train; on workers it changes nothing.
  const auto text = run_on_all([&](OperatorWorker& worker) { return worker.make_call(call, work); });
  if (text.empty()) {
    ended_ = true;
    throw session::TrainingEndedByCallback();
  }
  const auto result = json_from_text(text);
  history_.add({.call = call, .result = result});
  history_.advance();
  return result;
}

void OperatorRun::require_open() const {
  if (is_open_) return;
  throw Error(ExitCode::user_error, "calling an operator's trainer", "it is shut down, or has ended with an error",
              "Make a new one");
}

std::optional<Error> OperatorRun::attempt(const std::function<void()>& work, std::string* result) {
  const auto& world = resolved_.world();
  try {
    const comm::Timeouts limits{.done = resolved_.is_worker() ? resolved_.timeout : no_timeout,
                                .failed = comm::final_grace(world)};
    auto error = comm::attempt_on_all(world, limits, [&] {
      if (resolved_.is_worker()) work();
    });
    if (!error && result != nullptr && resolved_.worker_count < world.size()) *result = world.broadcast(*result);
    return error;
  } catch (const comm::RanksMissing& lost) {
    is_open_ = false;
    run_.write_error(world, lost);
    throw;
  }
}

std::string OperatorRun::run(const std::function<std::string()>& work) {
  require_open();
  const auto& world = resolved_.world();
  auto* const session = worker_ ? &worker_->session() : nullptr;
  std::string result;
  const auto call = [&] { result = work(); };
  const auto error = attempt(
      [&] {
        try {
          session != nullptr ? session->run(call) : call();
        } catch (...) {
          // Raise the alarm first: ending the session closes connections on which other ranks may be waiting.
          const auto cause = comm::current_outcome(world);
          comm::raise_alarm(world, cause);
          if (session != nullptr) session->fail(cause);
          throw;
        }
      },
      &result);
  if (!error) return result;
  is_open_ = false;
  if (world.rank() == 0 && error->code() != ExitCode::stopped) run_.write_error(error->what());
  throw *error;
}

StateDict OperatorRun::state_dict() {
  StateDict state;
  run_on_all([&](OperatorWorker& worker) { return state = worker.state_dict(), std::string(); });
  if (resolved_.worker_count < resolved_.world().size()) state = checkpoint::broadcast(resolved_.world(), state);
  return state;
}

Result OperatorRun::run_trial(std::int64_t num_iterations, const std::function<Json(std::int64_t)>& step) {
  of_trial_ = true;
  if (worker_) worker_->begin_trial();
  const auto has_ended = [](OperatorWorker& worker) { return std::string(worker.has_ended() ? "ended" : ""); };
  for (std::int64_t iteration = 0; iteration < num_iterations; ++iteration) {
    if (history_.next() == nullptr && !run_on_all(has_ended).empty()) break;
    const auto result = step(iteration);
    if (!result.is_object())
      throw Error(ExitCode::user_error, "reporting a step of a trial", "its return value is not a JSON object",
                  "Give names and values, as {{\"val_loss\", 0.1}}");
    run_or_replay(Call::step, {}, [&](OperatorWorker& worker) { return worker.report_step(result); });
  }
  shutdown(false);
  return trainer::read_result(resolved_, run_);
}

void OperatorRun::shutdown(bool force) {
  if (!is_open_) return;
  if (!force && history_.next() != nullptr)
    refuse_calls(
        str("main has made ", history_.position(), " of the ", history_.size(),
            " calls of the trainer that were made before the run was resumed: the model is later than the results"));
  if (!force) {
    run_on_all([](OperatorWorker& worker) { return worker.session().close(), std::string(); });
  } else if (worker_) {
    worker_->session().end(ended_ ? std::nullopt : std::optional(Error(ExitCode::user_error, "shut down by force")));
  }
  if ((!force || ended_) && resolved_.world().rank() == 0) {
    run_.mark_finished({});
    if (keeps_folder() && !of_trial_) try {
        trainer::print_summary(resolved_, Result::from_path(run_.path()));
      } catch (const std::exception& error) {
        log::warn(error.what());  // only a warning, since the run has ended well and the other ranks continue
      }
  }
  is_open_ = false;
  if (!force && !keeps_folder()) run_.remove_if_unused(resolved_.world());
}

OperatorWorker& OperatorRun::worker() const {
  if (!worker_)
    throw Error(ExitCode::usage, "asking for the operator or its model", "this rank does not train",
                "Ask on the first num_workers ranks");
  return *worker_;
}

}  // namespace muster::detail::operators
