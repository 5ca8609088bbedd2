#include "operators/operator_run.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/row_fields.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/merge.hpp"
#include "comm/agreement.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/on_ranks.hpp"
#include "comm/timeout.hpp"
#include "launch/settings.hpp"
#include "launch/supervised.hpp"
#include "muster/error.hpp"
#include "operators/results.hpp"
#include "run/failures.hpp"
#include "session/random.hpp"
#include "state/collect.hpp"
#include "state/copy.hpp"
#include "state/training_position.hpp"
#include "trainer/fit.hpp"
#include "watch/record.hpp"

#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace muster::detail::operators {
namespace {

namespace fs = std::filesystem;

/// Key in a state_dict() that was taken during a replay: the state is then later than the one that this call returned
/// when main made it first.
constexpr const char* stale_key = "gone";

bool choose_gpu(UseGpu option, const Communicator& world) {
  if (option != UseGpu::automatic) return option == UseGpu::always;
  return world.all_reduce(std::int64_t{at::detail::getCUDAHooks().deviceCount() > 0}, ReduceOp::min) != 0;
}

/// The configuration of one worker: BATCH_SIZE, the size of a step, is divided by the number of workers.
Config divide_batch_size(Config config, const run::ResolvedOptions& resolved) {
  const auto found = config.find(BATCH_SIZE);
  if (found == config.end()) return config;
  const std::string doing = std::string("dividing ") + BATCH_SIZE;
  const int workers = resolved.full_worker_count > 0 ? resolved.full_worker_count : resolved.worker_count;
  if (!found->is_number_integer() || found->get<std::int64_t>() < workers)
    throw Error(ExitCode::usage, doing,
                "it is " + found->dump() + ", and " + std::to_string(workers) +
                    (workers == 1 ? " worker needs" : " workers need") + " at least one sample each",
                "It is the number of samples of a step over all workers");
  const auto all = found->get<std::int64_t>();
  const auto each = all / workers;
  if (each * workers != all && resolved.world().rank() == 0)
    log::warn(doing + ": " + std::to_string(all) + " is no multiple of " + std::to_string(workers) +
              " workers; each takes " + std::to_string(each) + ", a step " + std::to_string(each * workers));
  *found = each;
  return config;
}

/// Throws an Error unless save() may replace `path`. It replaces only its own checkpoints: no other folder of the
/// user's, no checkpoint that holds other files, too, and no run's checkpoint.
void require_replaceable(const fs::path& path) {
  const auto type = status_of(path).type();
  std::error_code unreadable;
  if (type == fs::file_type::not_found) return;
  if (type == fs::file_type::directory && fs::is_empty(path, unreadable)) return;
  std::string fact;
  if (type == fs::file_type::symlink) {
    fact = "it is a symbolic link";
  } else if (type != fs::file_type::directory || !checkpoint::is_checkpoint(path)) {
    fact = "it exists and is not a checkpoint";
  } else {
    for (const auto& entry : fs::directory_iterator(path, unreadable))
      if (const auto name = entry.path().filename();
          name != checkpoint::manifest_name && name != checkpoint::state_name)
        fact = "the checkpoint there holds \"" + name.string() + "\" too";
    if (state::training_position_from_json(checkpoint::read_manifest(path).progress).is_from_run)
      fact = "the checkpoint there is a run's";
  }
  if (!fact.empty())
    throw Error(ExitCode::usage, "saving the operator's state in " + path.string(), fact,
                "Name a folder that does not exist, or a checkpoint of an earlier save(), which is then replaced");
}

std::string to_line(const Json& json) { return json_text_lossy(json); }

}  // namespace

run::ResolvedOptions OperatorRun::resolve_options() {
  const auto& world = launch_.communicator();
  if (options_.initialization_hook)
    comm::check_on_all(world, {.done = comm::timeout(world), .failed = comm::final_grace(world)},
                       options_.initialization_hook);
  const auto frequency = options_.scheduler_step_freq;
  comm::require_same_options(world, "the operator's trainer",
                             {{"use_gpu", static_cast<int>(options_.use_gpu)},
                              {"wrap_ddp", options_.wrap_ddp},
                              {"use_fp16", options_.use_fp16},
                              {"add_dist_sampler", options_.add_dist_sampler},
                              {"scheduler_step_freq", frequency ? Json(static_cast<int>(*frequency)) : Json()}});
  const bool named = launch_.flags().name.has_value();
  saves_checkpoints_ = named || launch::supervisor();
  keeps_folder_ = saves_checkpoints_ || launch_.flags().storage;
  auto resolved =
      run::resolve(launch_,
                   {.train_loop_config = options_.config,
                    .torch_config = {.backend = options_.backend, .timeout = options_.timeout},
                    .scaling_config = {.num_workers = options_.num_workers.most() ? options_.num_workers : 1,
                                       .use_gpu = choose_gpu(options_.use_gpu, world),
                                       .threads_per_worker = options_.num_cpus_per_worker},
                    .dataset_config = {.datasets_to_split = std::vector<std::string>()},  // see OperatorLoader
                    .run_config = {.checkpoint_config = {.num_to_keep = 2, .async_save = saves_checkpoints_}}},
                   trainer::torch_backend({.backend = options_.backend, .timeout = options_.timeout}));
  if (!options_.use_tqdm) resolved.progress = Progress::none;
  resolved.first_epoch = 1;
  const int waiting = launch_.size() - resolved.worker_count;
  if (!options_.num_workers.most() && !launch_.flags().workers && waiting > 0 && launch_.rank() == 0)
    log::warn("one rank trains and " + std::to_string(waiting) + (waiting == 1 ? " waits" : " wait") +
              ": num_workers is 1 unless given. Write .num_workers = launch.size() to train on all");
  return resolved;
}

OperatorRun::OperatorRun(Launch& launch, const Make& make, OperatorTrainerOptions options)
    : launch_(launch),
      options_(std::move(options)),
      resolved_(resolve_options()),
      run_(launch.communicator(), launch, resolved_.options.run_config, launch.next_trainer_number()),
      everywhere_(launch.communicator(), resolved_.timeout),
      device_(trainer::check_device_and_data(resolved_)),
      ranks_(resolved_, run_),
      exceptions_(std::uncaught_exceptions()) {
  const auto& world = resolved_.world();
  params_before_ = run_.params();
  const auto config_before = params_before_.is_object() ? params_before_.value("train_loop_config", Json()) : Json();
  trainer::begin_run(resolved_, run_);
  update_params(TrainOptions{}.max_retries);
  const auto workers = world.split(resolved_.is_worker() ? 0 : 1);
  try {
    history_.restore(run_on_all([&] {
      session_ =
          std::make_unique<session::OpenSession>(resolved_, run_, workers, workers.duplicate(), device_, bad_steps_);
      open(make);
      return history_.text();
    }));
  } catch (const Error& error) {
    if (run::is_refusal(error.code())) restore_params();
    throw;
  }
  if (!history_.empty() && !config_before.is_null() && config_before != resolved_.options.train_loop_config &&
      world.rank() == 0)
    log::warn("the run " + run_.path().string() + " goes on with another configuration: the first " +
              std::to_string(history_.size()) +
              " calls of the trainer return their saved results. Choose another --name to begin anew");
}

OperatorRun::~OperatorRun() {
  if (!ranks_.is_open()) return;
  if (comm::mpi_is_finalised()) {  // the launch may be gone, too
    log::warn("the trainer of the run " + run_.path().string() +
              " was not shut down before the launch ended, so the run is not marked as finished. Call "
              "shutdown(), or let the trainer end, inside Launch::run()");
    return;
  }
  try {
    shutdown(std::uncaught_exceptions() > exceptions_);
  } catch (...) {
    const auto cause = comm::current_outcome();
    comm::raise_alarm(resolved_.world(), cause);  // Launch::run() ends with it
    if (session_ && ranks_.is_open()) session_->fail(cause);
  }
}

void OperatorRun::open(const Make& make) {
  session_->state().callback_end.let_caller_ask();
  session_->open();
  session_->state().end_if_already_done();
  operator_ = make();
  auto parts = std::make_unique<OperatorRegistry>(session_->state(), session_->user_session(), options_,
                                                  divide_batch_size(resolved_.options.train_loop_config, resolved_));
  parts_ = parts.get();
  OperatorRegistry::attach(*operator_, std::move(parts));
  operator_->setup(parts_->config);
  entries_ = parts_->state_entries(*operator_);
  auto all = entries_;
  all.emplace_back("calls", StateEntry(
                                [this] {
                                  const auto& source = parts_->train;
                                  return StateDict{.tensors = {{"done", history_.bytes()}},
                                                   .values = {{"open", source.has_open_pass()},
                                                              {"taken", source.batches_taken()},
                                                              {"training", training_}}};
                                },
                                [this](const StateDict& saved) {
                                  const auto done = saved.tensors.find("done");
                                  if (done == saved.tensors.end())
                                    throw Error(ExitCode::data, "restoring the calls of an operator's trainer",
                                                "the checkpoint has none", "Choose another --name to begin anew");
                                  history_.restore(done->second);
                                  parts_->train.restore(saved.values.at("open"), saved.values.at("taken"));
                                  training_ = saved.values.value("training", false);
                                }));
  run_entries_ = std::make_shared<const StateEntries>(std::move(all));
  if (!session_->state().restore(run_entries_)) return;
  // The pass positions' epoch is that of the last pass, as it was when the calls were made.
  if (auto& source = parts_->train; !source.resumes_open_pass()) source.set_epoch_count(source.epoch_count());
  random_state_ = session::generator_state(device_);
}

void OperatorRun::restore_random_state() {
  if (session_ && !random_state_.empty()) session::set_generator_state(std::exchange(random_state_, {}), device_);
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
  history_.step();
  // Random numbers that main draws between the last replayed call and the next call must be the same as in a run that
  // was not interrupted.
  if (history_.next() == nullptr && !training_) restore_random_state();
  if (before.call == call && before.refusal) throw *before.refusal;
  if (before.call == call) return before.result;
  refuse_calls("call " + std::to_string(history_.position()) + " of the trainer is " + name_of(call) + "() and was " +
               name_of(before.call) + "() before the run was resumed");
}

Json OperatorRun::run_or_replay(Call call, const std::function<void()>& check, const std::function<Json()>& work) {
  ranks_.require_open();
  if (const auto* const before = history_.next()) return replay(call, *before);
  try {
    ranks_.require(check);
  } catch (const Error& refused) {
    if (ranks_.is_open()) {
      history_.add({.call = call, .refusal = Error(refused.code(), refused.what())});
      history_.step();
    }
    throw;
  }
  // Workers save the result before their state is saved; ranks that do not train save it afterwards.
  const auto text = run_on_all([&]() -> std::string {
    session_->state().progress.steps->epoch.call = static_cast<std::int64_t>(history_.position());
    try {
      auto result = work();
      history_.add({.call = call, .result = result});
      return to_line(result);
    } catch (const session::TrainingEndedByCallback&) {
      return {};
    }
  });
  if (text.empty()) {
    ended_ = true;
    throw session::TrainingEndedByCallback();
  }
  const auto result = json_from_text(text);
  history_.add({.call = call, .result = result});
  history_.step();
  changed_ = changed_ || changes_state(call);
  return result;
}

Metrics OperatorRun::row_metrics(const Json& result) const {
  Metrics metrics;
  for (const auto& [name, value] : result.items())
    if (name != "num_samples" && (!value.is_object() || is_reserved(name))) metrics.emplace(name, Metric(value));
  metrics.emplace("epoch", parts_->train.epoch_count());  // the user's own wins
  return metrics;
}

Json OperatorRun::finish_call(Call call, const Metrics& own, bool reduce, bool saves) {
  auto& view = session_->user_session();
  std::vector<Json> of_workers;
  for (const auto& bytes : session_->state().workers.control.all_gather(json_to_cbor(to_weighted_json(own))))
    of_workers.push_back(json_from_cbor(bytes));
  const auto mean = reduce_over_workers(of_workers);
  auto result = reduce ? mean : list_over_workers(of_workers);
  training_ = false;
  history_.add({.call = call, .result = json_from_text(to_line(result))});
  if (of_trial_) return result;
  if (saves)
    session_->state().report({.metrics = row_metrics(mean), .entries = run_entries_});
  else
    view.report(row_metrics(mean));
  return result;
}

template <class Options>
void OperatorRun::require_same(const char* call, const Options& options) const {
  comm::require_same_options(session_->state().workers.control, call,
                             {{"num_steps", options.num_steps ? Json(*options.num_steps) : Json()},
                              {"profile", options.profile},
                              {"reduce_results", options.reduce_results}});
}

Json OperatorRun::train(const TrainOptions& options) {
  const auto check = [&] {
    require_same("train()", options);
    if (options.max_retries < 0)
      throw Error(ExitCode::usage, "training", "max_retries is " + std::to_string(options.max_retries),
                  "Give 0 or more");
    parts_->train.check_call(options.num_steps, !parts_->models.empty());
  };
  return run_or_replay(Call::train, check, [&] {
    const watch::ScopedCallName training("train");
    auto& state = session_->state();
    auto& source = parts_->train;
    auto& timers = operator_->timers;
    if (state.callback_end.has_ended()) throw session::TrainingEndedByCallback();
    update_params(options.max_retries, /*trains=*/true);
    if (std::exchange(training_, true)) restore_random_state();
    if (std::exchange(changed_, false) && saves_checkpoints_) {
      state.models.synchronise_buffers();
      state.outputs.wait_for_save();
      state.saver.save({.entries = run_entries_.get(), .must_wait = state.stopper.is_known()});
    }
    source.begin_call(options.num_steps);
    timers.enable(options.profile);
    Metrics own;
    {
      const auto time = timers.record("train_epoch");
      OperatorBatches batches(source);
      own = operator_->train_epoch(
          batches, {.epoch_idx = source.epoch_count() - 1, .num_steps = options.num_steps, .info = options.info});
    }
    source.end_call();
    own.insert_or_assign("epoch", source.epoch_count());
    if (options.profile) own.insert_or_assign("profile", timers.stats());
    timers.enable(false);
    return finish_call(Call::train, own, options.reduce_results, saves_checkpoints_);
  });
}

Json OperatorRun::validate(const ValidateOptions& options) {
  const auto check = [&] {
    require_same("validate()", options);
    parts_->validation.check_call(options.num_steps, !parts_->models.empty());
  };
  return run_or_replay(Call::validate, check, [&] {
    const watch::ScopedCallName validating("validate");
    auto& source = parts_->validation;
    auto& timers = operator_->timers;
    const auto epoch = std::max<std::int64_t>(0, parts_->train.epoch_count() - 1);
    source.begin_call(options.num_steps, epoch);
    timers.enable(options.profile);
    Metrics own;
    {
      const at::NoGradGuard no_grad;
      std::vector<std::unique_ptr<Evaluation>> modes;
      for (const auto& model : parts_->models)
        modes.emplace_back(new Evaluation(session_->user_session().evaluation(model)));
      const auto time = timers.record("validation");
      OperatorBatches batches(source);
      own = operator_->validate(batches, {.epoch_idx = epoch, .num_steps = options.num_steps, .info = options.info});
    }
    source.end_call();
    if (options.profile) own.insert_or_assign("profile", timers.stats());
    timers.enable(false);
    return finish_call(Call::validate, own, options.reduce_results, false);
  });
}

bool OperatorRun::has_ended() {
  return !run_on_all([&] { return std::string(session_->state().callback_end.has_ended() ? "ended" : ""); }).empty();
}

void OperatorRun::report_step(const std::function<Json()>& step) {
  const auto result = step();
  if (!result.is_object())
    throw Error(ExitCode::user_error, "reporting a step of a trial", "its return value is not a JSON object",
                "Give names and values, as {{\"val_loss\", 0.1}}");
  run_or_replay(
      Call::step, [] {},
      [&] {
        history_.add({.call = Call::step});
        session_->state().report({.metrics = row_metrics(result), .entries = run_entries_});
        return Json();
      });
}

Result OperatorRun::run_trial(std::int64_t num_iterations, const std::function<Json(std::int64_t)>& step) {
  of_trial_ = true;
  for (std::int64_t iteration = 0; iteration < num_iterations; ++iteration) {
    const bool was_done_before = history_.next() != nullptr;
    if (!was_done_before && has_ended()) break;
    report_step([&] {
      if (step) return step(iteration);
      auto result = train({});
      const bool validates = !run_on_all([&] { return std::string(has_validation_loader() ? "yes" : ""); }).empty();
      if (validates) result.update(validate({}));
      return result;
    });
  }
  shutdown(false);
  return trainer::read_result(resolved_, run_);
}

Json OperatorRun::gather(const Json& own) const {
  Json all = Json::array();
  for (const auto& text : session_->state().workers.control.all_gather(to_line(own)))
    all.push_back(json_from_text(text));
  return all;
}

Json OperatorRun::apply(const std::function<Json()>& function) {
  return json_from_text(run_on_all([&] { return to_line(gather(function())); }));
}

Json OperatorRun::apply(const std::function<Json(TrainingOperator&)>& function) {
  // The history holds the results, but no data: so a call that registers data is made again.
  if (history_.next() != nullptr && history_.next()->registers_data) register_again(function);
  return run_or_replay(
      Call::apply_all_operators, [] {},
      [&] {
        const auto before = parts_->data_registration_count;
        auto result = gather(function(*operator_));
        if (parts_->data_registration_count != before)
          history_.add({.call = Call::apply_all_operators, .result = result, .registers_data = true});
        return result;
      });
}

void OperatorRun::register_again(const std::function<Json(TrainingOperator&)>& function) {
  run_on_all([&] {
    const TrainBatches::KeepPosition keep(parts_->train);
    // Whatever else it changes is set back to the saved state.
    auto state = state::collect(entries_);
    for (auto& [path, tensor] : state.tensors) tensor = tensor.clone();
    function(*operator_);
    return restore(state), std::string();
  });
}

void OperatorRun::update_scheduler(double metric) {
  const auto check = [&] {
    if (parts_->plateaus.empty())
      throw Error(ExitCode::user_error, "updating the scheduler with a metric",
                  "no registered scheduler takes a metric", "Register a torch::optim::ReduceLROnPlateauScheduler");
  };
  run_or_replay(Call::update_scheduler, check, [&] {
    const auto bytes = session_->state().workers.control.broadcast(json_to_cbor(metric));
    for (const auto& scheduler : parts_->plateaus) scheduler->step(json_from_cbor(bytes).get<float>());
    return Json();
  });
}

StateDict OperatorRun::state_dict() {
  StateDict state;
  run_on_all([&] {
    session_->state().models.synchronise_buffers();
    state = state::collect(entries_);
    for (auto& [path, tensor] : state.tensors)
      tensor = tensor.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
    if (history_.next() != nullptr || parts_->train.batches_taken() > 0) state.values["progress"][stale_key] = true;
    return std::string();
  });
  if (resolved_.worker_count < resolved_.world().size()) state = checkpoint::broadcast(resolved_.world(), state);
  return state;
}

void OperatorRun::require_fit(const StateDict& saved) const {
  const auto& workers = session_->state().workers;
  state::require_fit(entries_, saved, {workers.rank(), workers.size()});
}

void OperatorRun::restore(const StateDict& saved) {
  const auto& workers = session_->state().workers;
  comm::run_on_all(workers.control, [&] { state::restore(entries_, saved, {workers.rank(), workers.size()}); });
}

void OperatorRun::load_state_dict(const StateDict& state) {
  const auto check = [&] {
    if (state.values.value("progress", Json::object()).contains(stale_key))
      throw Error(ExitCode::usage, "loading a state",
                  "it is from a call before the run was resumed, and was lost with the earlier process",
                  "Keep states with save(path) and load(path)");
    require_fit(state);
  };
  run_or_replay(Call::load_state_dict, check, [&] { return restore(state), Json(); });
}

void OperatorRun::save(const fs::path& path) {
  // save() changes nothing in the trainer. So it runs as the check: if it fails, the trainer stays open.
  const auto save = [&] {
    session_->state().models.synchronise_buffers();
    comm::run_on_root(session_->state().workers.control, [&] {
      const auto whole = run::absolute_path(path);
      restore_directory(whole);
      require_replaceable(whole);
      // It replaces the old one only when it is complete.
      const auto unfinished = whole.parent_path() / ("." + whole.filename().string() + ".saving");
      std::error_code ignored;  // whoever writes there reports it
      fs::remove_all(unfinished, ignored);
      try {
        Checkpoint::from_dict(entries_).to_directory(unfinished);
      } catch (...) {
        fs::remove_all(unfinished, ignored);
        throw;
      }
      replace_directory(unfinished, whole);
    });
  };
  run_or_replay(Call::save, save, [] { return Json(); });
}

void OperatorRun::load(const fs::path& path) {
  StateDict saved;
  const auto check = [&] {
    const auto& control = session_->state().workers.control;
    comm::run_on_root(control, [&] {
      const auto whole = run::absolute_path(path);
      restore_directory(whole);
      saved = Checkpoint::from_directory(whole).to_dict();
    });
    saved = checkpoint::broadcast(control, saved);
    require_fit(saved);
  };
  run_or_replay(Call::load, check, [&] { return restore(saved), Json(); });
}

void OperatorRun::update_params(int max_retries, bool trains) {
  if (resolved_.world().rank() != 0) return;
  auto params = run_.params();
  if (trains) params.erase("finished"), params.erase("return_value");
  if (launch::supervisor()) params["run_config"]["max_retries"] = max_retries;
  if (params == run_.params()) return;
  try {
    run_.write_params(std::move(params));
  } catch (const std::exception& error) {
    log::warn(std::string("params.json could not be written, so muster run does not know max_retries: ") +
              error.what());
  }
}

void OperatorRun::print_summary() const {
  try {
    trainer::print_summary(resolved_, Result::from_path(run_.path()));
  } catch (const std::exception& error) {
    log::warn(error.what());  // the run has ended well, and the other ranks go on
  }
}

void OperatorRun::shutdown(bool force) {
  if (!ranks_.is_open()) return;
  if (!force && history_.next() != nullptr)
    refuse_calls(
        "main has made " + std::to_string(history_.position()) + " of the " + std::to_string(history_.size()) +
        " calls of the trainer that were made before the run was resumed: the model is later than the results");
  if (!force) {
    run_on_all([&] { return session_->close(), std::string(); });
  } else if (session_) {
    session_->end(ended_ ? std::nullopt : std::optional(Error(ExitCode::user_error, "shut down by force")));
  }
  if ((!force || ended_) && resolved_.world().rank() == 0) {
    run_.mark_finished({});
    if (keeps_folder_ && !of_trial_) print_summary();
  }
  ranks_.close();
  if (!force && !keeps_folder_) run_.remove_if_unused(resolved_.world());
}

TrainingOperator& OperatorRun::local_operator() {
  if (!operator_)
    throw Error(ExitCode::usage, "asking for the operator or its model", "this rank does not train",
                "Ask on the first num_workers ranks");
  return *operator_;
}

}  // namespace muster::detail::operators
