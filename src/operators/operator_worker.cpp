#include "operators/operator_worker.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/row_fields.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/merge.hpp"
#include "comm/on_ranks.hpp"
#include "launch/supervised.hpp"
#include "muster/error.hpp"
#include "operators/results.hpp"
#include "session/random.hpp"
#include "state/collect.hpp"
#include "state/training_position.hpp"
#include "watch/record.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace muster::detail::operators {
namespace {

namespace fs = std::filesystem;

/// Key that state_dict() adds during a replay, and before a train() that a resumed run continues. The state is then
/// later than the state that main() got from the same call before the run was resumed.
constexpr const char* stale_key = "gone";

/// Returns the configuration of one worker: BATCH_SIZE, the number of samples per step, is divided by the number of
/// workers, and missing workers count.
Config divide_batch_size(Config config, const run::ResolvedOptions& resolved) {
  const auto found = config.find(BATCH_SIZE);
  if (found == config.end()) return config;
  const std::string doing = str("dividing ", BATCH_SIZE);
  const int workers = resolved.full_worker_count > 0 ? resolved.full_worker_count : resolved.worker_count;
  if (!found->is_number_integer() || found->get<std::int64_t>() < workers)
    throw Error(ExitCode::usage, doing,
                str("it is ", found->dump(), ", and ", workers, workers == 1 ? " worker needs" : " workers need",
                    " at least one sample each"),
                "It is the number of samples of a step over all workers");
  const auto all = found->get<std::int64_t>();
  const auto each = all / workers;
  if (each * workers != all && resolved.world().rank() == 0)
    log::warn(str(doing, ": ", all, " is no multiple of ", workers, " workers; each takes ", each, ", a step ",
                  each * workers));
  *found = each;
  return config;
}

/// Throws an Error unless save() may replace `path`. It may only replace empty folders and its own checkpoints: no
/// other folder of the user's, no checkpoint that also holds other files, and no run's checkpoint.
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
    if (state::training_position_from_json(checkpoint::read_manifest(path).position_json).is_from_run)
      fact = "the checkpoint there is a run's";
  }
  if (!fact.empty())
    throw Error(ExitCode::usage, "saving the operator's state in " + path.string(), fact,
                "Name a folder that does not exist, or a checkpoint of an earlier save(), which is then replaced");
}

/// Throws an Error, the same on all workers, if the workers have given a call different options. Collective over the
/// workers.
template <class Options>
void require_same(const Communicator& workers, const char* call, const Options& options) {
  comm::require_same_options(workers, call,
                             {{"num_steps", options.num_steps ? Json(*options.num_steps) : Json()},
                              {"profile", options.profile},
                              {"reduce_results", options.reduce_results}});
}

/// Runs the operator's own part of a call. With `profile`, adds the times that the timers have measured in it.
Metrics run_timed(Timers& timers, bool profile, const char* name, const std::function<Metrics()>& work) {
  timers.enable(profile);
  auto own = [&] {
    const auto time = timers.record(name);
    return work();
  }();
  if (profile) own.insert_or_assign("profile", timers.stats());
  timers.enable(false);
  return own;
}

}  // namespace

bool saves_checkpoints(const LaunchFlags& flags) { return flags.name || launch::supervisor(); }

OperatorWorker::OperatorWorker(const run::ResolvedOptions& resolved, run::RunFolder& run, const Communicator& workers,
                               at::Device device, CallHistory& history)
    : run_(run),
      history_(history),
      session_(resolved, run, workers, workers.duplicate(), device, bad_steps_),
      saves_checkpoints_(saves_checkpoints(resolved.flags)) {}

void OperatorWorker::open(const Make& make, const OperatorTrainerOptions& options) {
  auto& state = session_.state();
  state.callback_end.let_caller_ask();
  session_.open();
  state.end_if_already_done();
  operator_ = make();
  const auto config = divide_batch_size(state.resolved.options.train_loop_config, state.resolved);
  OperatorRegistry::attach(*operator_,
                           std::make_unique<OperatorRegistry>(state, session_.user_session(), options, config));
  operator_->setup(registry().config);
  entries_ = registry().state_entries(*operator_);
  auto all = entries_;
  all.emplace_back("calls", StateEntry(
                                [this] {
                                  const auto& source = registry().train;
                                  return StateDict{.tensors = {{"done", history_.bytes()}},
                                                   .values = {{"open", source.has_open_pass()},
                                                              {"taken", source.batches_taken()},
                                                              {"training", is_training_}}};
                                },
                                [this](const StateDict& saved) {
                                  const auto done = saved.tensors.find("done");
                                  if (done == saved.tensors.end())
                                    throw Error(ExitCode::data, "restoring the calls of an operator's trainer",
                                                "the checkpoint has none", "Choose another --name to begin anew");
                                  history_.restore(done->second);
                                  registry().train.restore(saved.values.at("open"), saved.values.at("taken"));
                                  is_training_ = saved.values.value("training", false);
                                }));
  run_entries_ = std::make_shared<const StateEntries>(std::move(all));
  if (!state.restore(run_entries_)) return;
  // If no pass is open, the saved calls belong to the epoch of the last pass, so the position must be in it, too.
  if (auto& source = registry().train; !source.resumes_open_pass()) source.set_epoch_count(source.epoch_count());
  random_state_ = session::generator_state(state.workers.device);
}

std::string OperatorWorker::make_call(Call call, const std::function<Json(OperatorWorker&)>& work) {
  session_.state().progress.steps->epoch.call = static_cast<std::int64_t>(history_.position());
  try {
    const auto result = work(*this);
    history_.add({.call = call, .result = result});
    has_unsaved_change_ = has_unsaved_change_ || changes_state(call);
    return json_text_lossy(result);
  } catch (const session::TrainingEndedByCallback&) {
    return {};
  }
}

void OperatorWorker::end_replay() {
  if (!is_training_) restore_random_state();
}

void OperatorWorker::restore_random_state() {
  if (!random_state_.empty()) session::set_generator_state(std::exchange(random_state_, {}), workers().device);
}

Metrics OperatorWorker::row_metrics(const Json& result) const {
  Metrics metrics;
  for (const auto& [name, value] : result.items())
    if (name != "num_samples" && (!value.is_object() || is_reserved(name))) metrics.emplace(name, Metric(value));
  metrics.emplace("epoch", registry().train.epoch_count());  // does not replace a metric of this name from the user
  return metrics;
}

Json OperatorWorker::finish_call(Call call, const Metrics& own, bool reduce, bool saves) {
  std::vector<Json> of_workers;
  for (const auto& bytes : workers().control.all_gather(json_to_cbor(to_weighted_json(own))))
    of_workers.push_back(json_from_cbor(bytes));
  const auto mean = reduce_over_workers(of_workers);
  auto result = reduce ? mean : list_over_workers(of_workers);
  is_training_ = false;
  history_.add({.call = call, .result = json_from_text(json_text_lossy(result))});
  if (!reports_calls_) return result;
  if (saves)
    session_.state().report({.metrics = row_metrics(mean), .entries = run_entries_});
  else
    session_.user_session().report(row_metrics(mean));
  return result;
}

void OperatorWorker::check(const TrainOptions& options) {
  require_same(workers().control, "train()", options);
  if (options.max_retries < 0)
    throw Error(ExitCode::usage, "training", str("max_retries is ", options.max_retries), "Give 0 or more");
  registry().train.check_call(options.num_steps, !registry().models.empty());
}

Json OperatorWorker::train(const TrainOptions& options) {
  const watch::ScopedCallName training("train");
  auto& state = session_.state();
  auto& source = registry().train;
  if (has_ended()) throw session::TrainingEndedByCallback();
  update_params(state.resolved.world(), run_, options.max_retries, /*trains=*/true);
  if (std::exchange(is_training_, true)) restore_random_state();
  if (std::exchange(has_unsaved_change_, false) && saves_checkpoints_) {
    state.models.synchronise_statistics();
    state.outputs.wait_for_save();
    state.saver.save({.entries = run_entries_.get(), .must_wait = state.stopper.is_known()});
  }
  source.begin_call(options.num_steps);
  auto own = run_timed(operator_->timers, options.profile, "train_epoch", [&] {
    OperatorBatches batches(source);
    return operator_->train_epoch(
        batches, {.epoch_idx = source.epoch_count() - 1, .num_steps = options.num_steps, .info = options.info});
  });
  source.end_call();
  own.insert_or_assign("epoch", source.epoch_count());
  return finish_call(Call::train, own, options.reduce_results, saves_checkpoints_);
}

void OperatorWorker::check(const ValidateOptions& options) {
  require_same(workers().control, "validate()", options);
  registry().validation.check_call(options.num_steps, !registry().models.empty());
}

Json OperatorWorker::validate(const ValidateOptions& options) {
  const watch::ScopedCallName validating("validate");
  auto& source = registry().validation;
  const auto epoch = std::max<std::int64_t>(0, registry().train.epoch_count() - 1);
  source.begin_call(options.num_steps, epoch);
  const auto own = [&] {
    const at::NoGradGuard no_grad;
    std::vector<std::unique_ptr<Evaluation>> modes;
    for (const auto& model : registry().models)
      modes.emplace_back(new Evaluation(session_.user_session().evaluation(model)));
    return run_timed(operator_->timers, options.profile, "validation", [&] {
      OperatorBatches batches(source);
      return operator_->validate(batches, {.epoch_idx = epoch, .num_steps = options.num_steps, .info = options.info});
    });
  }();
  source.end_call();
  return finish_call(Call::validate, own, options.reduce_results, false);
}

Json OperatorWorker::report_step(const Json& result) {
  history_.add({.call = Call::step});
  session_.state().report({.metrics = row_metrics(result), .entries = run_entries_});
  return {};
}

Json OperatorWorker::gather(const Json& own) {
  Json all = Json::array();
  for (const auto& text : workers().control.all_gather(json_text_lossy(own))) all.push_back(json_from_text(text));
  return all;
}

Json OperatorWorker::apply(const std::function<Json(TrainingOperator&)>& function) {
  const auto before = registry().data_registration_count;
  auto result = gather(function(*operator_));
  if (registry().data_registration_count != before)
    history_.add({.call = Call::apply_all_operators, .result = result, .registers_data = true});
  return result;
}

void OperatorWorker::register_again(const std::function<Json(TrainingOperator&)>& function) {
  registry().train.keep_position(true);
  // The function may change the operator's state, too, so the state from before is restored.
  state::gather(entries_);
  auto state = state::collect(entries_);
  for (auto& [path, tensor] : state.tensors) tensor = tensor.clone();
  function(*operator_);
  restore(state);
  registry().train.keep_position(false);  // not reached after an exception, which ends the trainer
}

void OperatorWorker::require_plateau_scheduler() const {
  if (registry().plateaus.empty())
    throw Error(ExitCode::user_error, "updating the scheduler with a metric", "no registered scheduler takes a metric",
                "Register a torch::optim::ReduceLROnPlateauScheduler");
}

Json OperatorWorker::update_scheduler(double metric) {
  const auto bytes = workers().control.broadcast(json_to_cbor(metric));
  for (const auto& scheduler : registry().plateaus) scheduler->step(json_from_cbor(bytes).get<float>());
  return {};
}

StateDict OperatorWorker::state_dict() {
  session_.state().models.synchronise_statistics();
  state::gather(entries_);
  auto state = state::collect(entries_);
  for (auto& [path, tensor] : state.tensors)
    tensor = tensor.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
  if (history_.next() != nullptr || registry().train.batches_taken() > 0) state.values["progress"][stale_key] = true;
  return state;
}

void OperatorWorker::check(const StateDict& saved) {
  if (saved.values.value("progress", Json::object()).contains(stale_key))
    throw Error(ExitCode::usage, "loading a state",
                "it is from a call before the run was resumed, and was lost with the earlier process",
                "Keep states with save(path) and load(path)");
  require_fit(saved);
}

void OperatorWorker::require_fit(const StateDict& saved) const {
  state::require_fit(entries_, saved, {workers().rank(), workers().size()});
}

Json OperatorWorker::restore(const StateDict& saved) {
  comm::run_on_all(workers().control, [&] { state::restore(entries_, saved, {workers().rank(), workers().size()}); });
  return {};
}

void OperatorWorker::save(const fs::path& path) {
  session_.state().models.synchronise_statistics();
  comm::run_on_root(workers().control, [&] {
    const auto whole = run::absolute_path(path);
    restore_directory(whole);
    require_replaceable(whole);
    // The old checkpoint is replaced when the new one is complete.
    const auto unfinished = whole.parent_path() / ("." + whole.filename().string() + ".saving");
    std::error_code ignored;  // writing the folder fails, too, and reports the error
    fs::remove_all(unfinished, ignored);
    try {
      Checkpoint::from_dict(entries_).to_directory(unfinished);
    } catch (...) {
      fs::remove_all(unfinished, ignored);
      throw;
    }
    replace_directory(unfinished, whole);
  });
}

StateDict OperatorWorker::read(const fs::path& path) {
  StateDict saved;
  comm::run_on_root(workers().control, [&] {
    const auto whole = run::absolute_path(path);
    restore_directory(whole);
    saved = Checkpoint::from_directory(whole).to_dict();
  });
  saved = checkpoint::broadcast(workers().control, saved);
  require_fit(saved);
  return saved;
}

void update_params(const Communicator& world, run::RunFolder& run, int max_retries, bool trains) {
  if (world.rank() != 0) return;
  auto params = run.params();
  if (trains) params.erase("finished"), params.erase("return_value");
  if (launch::supervisor()) params["run_config"]["max_retries"] = max_retries;
  if (params == run.params()) return;
  try {
    run.write_params(std::move(params));
  } catch (const std::exception& error) {
    log::warn(str("params.json could not be written, so muster run does not know max_retries: ", error.what()));
  }
}

}  // namespace muster::detail::operators
