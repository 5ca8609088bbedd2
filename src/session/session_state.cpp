#include "session/session_state.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/run_names.hpp"
#include "comm/agreement.hpp"
#include "comm/rank_status.hpp"
#include "data/passes/pass_positions.hpp"
#include "muster/error.hpp"
#include "watch/record.hpp"

#include <cstdint>
#include <exception>
#include <map>
#include <utility>

namespace muster::detail::session {
namespace {

/// What a session does when a batch, an epoch or a pass begins or ends.
class SessionStepListener final : public step::StepListener {
 public:
  explicit SessionStepListener(SessionState& session) : session_(session) {}

  void micro_batch_changed(int micro_batch) override {
    auto& generators = session_.workers.generators;
    if (!generators) return;
    generators->switch_to(micro_batch);
    if (micro_batch < 0) return;
    session_.models.load_buffers_of(micro_batch);
  }
  void batch_begun(const step::OpenPass& pass) override {
    session_.attempt_end->throw_if_ended();
    // A pass inside of another pass is not noted: one rank alone may make it, to look at a batch.
    if (pass.batches == 1 && !session_.progress.steps->has_other_open_pass(pass.number, pass.in_loop))
      session_.same_passes.note(pass);
    if (pass.batches == 1) keep_passes_before_more();
    if (pass.batches == 1) gradients_before_[pass.number] = session_.models.gradient_count();
    session_.resumer.warn_of_unrestored_state(false);
    session_.gradients.compare();
    // A resumed run repeats the changes that the program makes before the first batch of a pass.
    pass.batches > 1 ? session_.saved_values.compare(session_.workers.is_first()) : session_.saved_values.forget();
    const auto& steps = *session_.progress.steps;
    const bool is_counted = pass.batch->completes_step();
    comm::note_step(session_.workers.communicator, steps.global_step + (is_counted ? 0 : 1), steps.epoch.number);
    if (!is_counted) return;
    if (session_.late_ranks) session_.late_ranks->begin_step(steps.global_step);
    if (session_.profiler) session_.profiler->begin_step(steps.global_step);
    const auto samples_left = pass.plan.samples - pass.position;
    last_of_pass_ = pass.plan.samples > 0 && samples_left < (pass.plan.drop_last ? pass.plan.global_batch : 1);
    session_.outputs.observers.tell(&observe::Observer::batch,
                                    observe::EpochPosition{.epoch = session_.progress.steps->epoch.number,
                                                           .epochs = session_.progress.epoch_count,
                                                           .consumed = pass.position,
                                                           .samples = pass.plan.samples,
                                                           .global_step = session_.progress.steps->global_step});
  }
  void epoch_begun() override {
    session_.saved_values.compare(session_.workers.is_first());
    keep_passes_before_more();
  }
  /// Called at a boundary between two batches.
  void stop_if_asked() {
    if (last_of_pass_ && !session_.progress.pass_end_is_boundary) return;
    const watch::ScopedCallName ask("asking whether to stop");
    // Compare only where the workers have just communicated. Elsewhere a worker may not be at this boundary, since it
    // looks at a batch of another pass.
    if (session_.stop_if_asked()) session_.same_passes.compare(session_.workers.control);
  }
  void pass_ended(const step::OpenPass& pass) override {
    const auto before = gradients_before_.extract(pass.number);
    const bool trained = before.empty() || before.mapped() != session_.models.gradient_count();
    // Do not warn of a single batch, which may have been taken for its shapes, or if muster averages no gradients at
    // all.
    if (trained || pass.batches < 2 || session_.models.averaged_parameters().empty()) return;
    if (std::uncaught_exceptions() > 0) return;  // the loop has ended by an exception
    if (std::exchange(warned_of_pass_, true) || !session_.workers.is_first()) return;
    log::warn("a training pass over \"" + pass.name +
              "\" ended and no gradients were averaged in it, but its batches " +
              "count as steps and samples of training. If it evaluates or measures, begin it under " +
              "session.evaluation(model) or torch::NoGradGuard, or with .training = false");
  }

 private:
  /// Writes passes_before_more to the run's folder if it has changed, since the newest checkpoint may be older.
  void keep_passes_before_more() {
    const auto passes = session_.progress.steps->epoch.passes_before_more;
    if (std::exchange(kept_passes_, passes) == passes || !session_.workers.is_first()) return;
    try {
      write_file(session_.run.path() / run_names::passes, json_text({{"passes_before_more", passes}}));
    } catch (const std::exception& error) {
      log::warn(str("noting the passes of an epoch: ", error.what()));
    }
  }

  SessionState& session_;
  std::int64_t kept_passes_ = 0;
  /// For each open pass, by number: gradient_count() at its first batch.
  std::map<std::int64_t, std::int64_t> gradients_before_;
  bool warned_of_pass_ = false;
  bool last_of_pass_ = false;  ///< true if the current batch is the last of its pass
};

Outputs outputs_of_training(const run::ResolvedOptions& resolved, const run::RunFolder& run,
                            const WorkerContext& workers) {
  const auto& config = resolved.options.run_config;
  return {.control = workers.control,
          .store = std::optional<checkpoint::CheckpointStore>(std::in_place, workers.control, run.path(),
                                                              config.checkpoint_config),
          .observers = {workers.is_first(),
                        {.folder = run.path(),
                         .progress = resolved.progress,
                         .first_epoch = resolved.first_epoch,
                         .world_size = workers.size(),
                         .settings = resolved.options.train_loop_config,
                         .validates = static_cast<bool>(resolved.options.validation.function)},
                        config},
          .config = config.checkpoint_config,
          .histogram_interval = config.tensorboard ? config.histogram_interval : 0,
          .is_first_worker = workers.is_first()};
}

Outputs outputs_of_validation(const Checkpoint& checkpoint) {
  return {.control = {}, .store = {}, .observers = observe::Observers({}), .config = {}, .newest = checkpoint};
}

}  // namespace

SessionState::SessionState(const run::ResolvedOptions& resolved_, const run::RunFolder& run_, WorkerContext workers_,
                           const std::optional<Checkpoint>& validated)
    : resolved(resolved_),
      run(run_),
      workers(std::move(workers_)),
      data{.datasets = resolved.options.datasets,
           .config = validated ? DataConfig{.split_all = true} : resolved.options.dataset_config,
           .preprocessor = resolved.options.preprocessor,
           .pass_positions = std::make_shared<data::PassPositions>(progress.steps)},
      outputs(validated ? outputs_of_validation(*validated) : outputs_of_training(resolved, run, workers)),
      gradients(models),
      epoch_end(workers, progress, data, models),
      resumer(*this),
      saver(*this),
      stopper(*this),
      callback_end(workers, progress, outputs, *attempt_end) {}

SessionState::SessionState(const run::ResolvedOptions& resolved_, const run::RunFolder& run_, const Communicator& own,
                           const Communicator& control, at::Device device, BadSteps& bad_steps)
    : SessionState(
          resolved_, run_,
          {.communicator = own,
           .control = control,
           .device = device,
           .share = resolved_.share_of(own.rank()),
           .full_worker_count = resolved_.options.scaling_config.virtual_workers ? 0 : resolved_.full_worker_count,
           .seed = run::seed_of(resolved_.flags, run_.params())},
          std::nullopt) {
  const auto listener = std::make_shared<SessionStepListener>(*this);
  progress.steps->listener = step_listener = listener;
  data.pass_positions->stop_if_asked = [weak = std::weak_ptr(listener)] {  // a data loader may outlive the session
    if (const auto live = weak.lock()) live->stop_if_asked();
  };
  const auto& failure_config = resolved.options.run_config.failure_config;
  if (failure_config.bad_numbers != BadNumbers::ignore)
    bad_numbers = std::make_shared<BadNumbersWatch>(failure_config, control, progress.steps, bad_steps, attempt_end);
  late_ranks.emplace(workers, outputs);
  if (const auto& profile = resolved.options.run_config.profile; profile.enabled)
    profiler.emplace(profile, run.path(), workers);
  if (workers.is_first()) stopper.watch_file(run.path() / "stop");
}

SessionState::SessionState(const run::ResolvedOptions& resolved_, const run::RunFolder& run_,
                           const Communicator& validators, at::Device device, const Checkpoint& checkpoint)
    : SessionState(resolved_, run_,
                   {.communicator = validators,
                    .control = validators,
                    .device = device,
                    .share = {.total = validators.size(), .first = validators.rank(), .count = 1},
                    .seed = run::seed_of(resolved_.flags, run_.params())},
                   checkpoint) {}

SessionState::~SessionState() = default;

void SessionState::throw_if_ended() const {
  attempt_end->throw_if_ended();
  if (outputs.store) comm::throw_if_alarm_raised(workers.control);  // in a validation, the next collective throws
}

void SessionState::require_training(const char* doing) const {
  if (!outputs.store)
    throw Error(ExitCode::usage, doing, "this session validates a checkpoint and does not train",
                "Load the model by Checkpoint::load, and return the metrics");
  throw_if_ended();
}

bool SessionState::restore(const std::shared_ptr<const StateEntries>& entries) {
  require_training("restoring a state");
  resumer.require_nothing_saved();
  const bool restored = resumer.restore(*entries);
  stopper.note_restored_state(entries);
  gradients.watch(*entries);
  return restored;
}

void SessionState::begin_epoch(std::int64_t epoch) {
  epoch_end.begin_epoch();
  data.pass_positions->begin_epoch(epoch);
}

bool SessionState::stop_if_asked() {
  if (bad_numbers) bad_numbers->require_watched(models.all());
  return stopper.stop_if_asked();
}

void SessionState::add_callback(std::shared_ptr<Callback> callback) {
  require_training("adding a callback");
  Session view(*this);
  outputs.observers.callbacks().add(std::move(callback), view);
  end_if_already_done();
}

void SessionState::end_if_already_done() {
  if (resumer.checkpoint()) callback_end.check();
}

void SessionState::end_training() {
  if (profiler) profiler->finish();
  outputs.wait_for_save();
  if (bad_numbers) bad_numbers->warn_of_skipped_steps();
  stopper.end_training();
  if (callback_end.has_ended() || progress.steps->epoch.is_counted() || progress.epoch_count > 0) return;
  if (const auto name = data.pass_positions->name_of_pass_not_resumed(/*in_loop=*/false); !name.empty())
    throw Error(
        ExitCode::user_error, "resuming the pass over \"" + name + "\"",
        "the run was saved in the middle of it, but the training function has ended without it: the session does not "
        "know the epochs, and the passes that were finished before it are empty now",
        "Loop over session.epochs(n), or call set_epoch(epoch) for each epoch");
}

}  // namespace muster::detail::session
