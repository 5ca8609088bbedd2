#include "session/session_state.hpp"
#include "base/log.hpp"
#include "comm/world.hpp"

#include "comm/rank_status.hpp"
#include "watch/record.hpp"

#include <map>
#include <utility>

namespace muster::detail::session {
namespace {

/// The session's callbacks on the events of a step.
class SessionStepListener final : public step::StepListener {
 public:
  explicit SessionStepListener(SessionState& session) : session_(session) {}

  void micro_batch_changed(int micro_batch) override {
    auto& generators = session_.workers.generators;
    if (!generators) return;
    generators->switch_to(micro_batch);
    if (micro_batch < 0) return;
    for (const auto& model : session_.models) model->load_buffers_of(micro_batch);
  }
  void batch_begun(const step::OpenPass& pass) override {
    if (pass.batches == 1) averaged_before_[pass.number] = session_.gradient_average_count();
    session_.warn_of_unrestored_state(false);
    const auto& steps = *session_.counters.steps;
    const bool is_counted = pass.batch->completes_step();
    comm::note_step(session_.workers.communicator, steps.global_step + (is_counted ? 0 : 1), steps.epoch);
    if (!is_counted) return;
    const auto samples_left = pass.plan.samples - pass.position;
    last_of_pass_ = pass.plan.samples > 0 && samples_left < (pass.plan.drop_last ? pass.plan.global_batch : 1);
    session_.outputs.sinks.batch({.epoch = session_.counters.steps->epoch,
                                  .epochs = session_.counters.epoch_count,
                                  .consumed = pass.position,
                                  .samples = pass.plan.samples});
    session_.outputs.callbacks.tell(&Callback::on_batch, session_.counters.steps->global_step);
  }
  void between_batches() override {
    if (last_of_pass_ && !session_.stop.pass_end_is_boundary) return;
    const watch::ScopedCallName ask("asking whether to stop");
    session_.stop_if_asked();
  }
  void pass_ended(const step::OpenPass& pass) override {
    const auto before = averaged_before_.extract(pass.number);
    const bool trained = before.empty() || before.mapped() != session_.gradient_average_count();
    // A single batch may have been taken for its shapes, and gradients may be averaged without muster or later.
    if (trained || pass.batches < 2 || session_.models.empty() || *session_.no_sync_depth > 0) return;
    if (std::exchange(warned_of_pass_, true) || !session_.workers.is_first()) return;
    log::warn("a training pass over \"" + pass.name +
              "\" ended and no gradients were averaged in it, but its batches " +
              "count as steps and samples of training. If it evaluates or measures, begin it under " +
              "session.evaluation(model) or torch::NoGradGuard, or with .training = false");
  }

 private:
  SessionState& session_;
  std::map<std::int64_t, std::int64_t> averaged_before_;  ///< of open passes, by number: averages when they began
  bool warned_of_pass_ = false;
  bool last_of_pass_ = false;  ///< the current batch is the last one of its pass
};

}  // namespace

SessionState::SessionState(const run::ResolvedOptions& resolved_, const run::RunFolder& run_, const Communicator& own,
                           const Communicator& control, at::Device device, BadSteps& bad_steps)
    : resolved(resolved_),
      run(run_),
      workers{.communicator = own,
              .control = control,
              .device = device,
              .share = resolved.share_of(own.rank()),
              .full_worker_count = resolved.options.scaling_config.virtual_workers ? 0 : resolved.full_worker_count,
              .seed = resolved.launch.flags().seed},
      data{.datasets = resolved.options.datasets,
           .config = resolved.options.dataset_config,
           .preprocessor = resolved.options.preprocessor,
           .pass_positions = std::make_shared<data::PassPositions>(counters.steps)},
      outputs{.store = std::optional<checkpoint::CheckpointStore>(std::in_place, control, run.path(),
                                                                  resolved.options.run_config.checkpoint_config),
              .sinks = {workers.is_first(), run.path(), resolved.progress, resolved.first_epoch},
              .callbacks = observe::Callbacks(resolved.options.run_config.callbacks),
              .config = resolved.options.run_config.checkpoint_config,
              .is_first_worker = workers.is_first()},
      step_listener(std::make_shared<SessionStepListener>(*this)) {
  counters.steps->listener = step_listener;
  const auto& failure_config = resolved.options.run_config.failure_config;
  if (failure_config.bad_numbers != BadNumbers::ignore)
    bad_numbers_watch = std::make_shared<BadNumbersWatch>(failure_config, control, counters.steps, bad_steps);
  if (workers.is_first()) stop.file = StopFile(run.path() / "stop");
  if (!outputs.config.async_save) return;
  snapshot_sources = std::make_shared<optim::SnapshotSources>();
  if (!comm::threads_may_call_mpi() && workers.is_first())
    log::warn("async_save: MPI was started for one thread, so each report waits until its checkpoint is written");
}

SessionState::SessionState(const run::ResolvedOptions& resolved_, const run::RunFolder& run_,
                           const Communicator& validators, at::Device device, const Checkpoint& checkpoint)
    : resolved(resolved_),
      run(run_),
      workers{.communicator = validators,
              .control = validators,
              .device = device,
              .share = {.total = validators.size(), .first = validators.rank(), .count = 1},
              .seed = resolved.launch.flags().seed},
      data{.datasets = resolved.options.datasets,
           .config = {.split_all = true},
           .preprocessor = resolved.options.preprocessor,
           .pass_positions = std::make_shared<data::PassPositions>(counters.steps)},
      outputs{.store = {},
              .sinks = observe::Sinks({}),
              .callbacks = observe::Callbacks({}),
              .config = {},
              .newest = checkpoint} {}

void SessionState::require_training(const char* doing) const {
  if (!outputs.store)
    throw Error(ExitCode::usage, doing, "this session validates a checkpoint and does not train",
                "Load the model by Checkpoint::load, and return the metrics");
}

}  // namespace muster::detail::session
