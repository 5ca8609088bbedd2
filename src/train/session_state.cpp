#include "train/session_state.hpp"
#include "base/log.hpp"
#include "comm/world.hpp"

#include "comm/whereabouts.hpp"
#include "watch/record.hpp"

#include <map>
#include <utility>

namespace muster::detail::train {
namespace {

/// The session's callbacks on the events of a step.
class SessionStepListener final : public step::Moments {
 public:
  explicit SessionStepListener(SessionState& session) : session_(session) {}

  void micro_batch_changed(int micro_batch) override {
    auto& generators = session_.workers.generators;
    if (!generators) return;
    generators->change_to(micro_batch);
    if (micro_batch < 0) return;
    for (const auto& model : session_.models) model->enter(micro_batch);
  }
  void batch_begun(const step::OpenPass& pass) override {
    if (pass.batches == 1) averaged_before_[pass.number] = session_.averaged_gradients();
    session_.warn_of_what_begins_again(false);
    const auto& steps = *session_.counters.steps;
    const bool is_counted = pass.batch->completes_step();
    comm::note_step(session_.workers.own, steps.global_step + (is_counted ? 0 : 1), steps.epoch);
    if (!is_counted) return;
    const auto samples_left = pass.plan.samples - pass.position;
    last_of_pass_ = pass.plan.samples > 0 && samples_left < (pass.plan.drop_last ? pass.plan.global_batch : 1);
    session_.outputs.sinks.batch({.epoch = session_.counters.steps->epoch,
                                  .epochs = session_.counters.epochs,
                                  .consumed = pass.position,
                                  .samples = pass.plan.samples});
    session_.outputs.callbacks.tell(&Callback::on_batch, session_.counters.steps->global_step);
  }
  void between_batches() override {
    if (last_of_pass_ && !session_.stop.at_end_of_pass) return;
    const watch::During ask("asking whether to stop");
    session_.stop_if_asked();
  }
  void pass_ended(const step::OpenPass& pass) override {
    const auto before = averaged_before_.extract(pass.number);
    const bool trained = before.empty() || before.mapped() != session_.averaged_gradients();
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

SessionState::SessionState(const Plan& plan_, const RunFolder& run_, const Communicator& own,
                           const Communicator& control, at::Device device, BadSteps& bad_steps)
    : plan(plan_),
      run(run_),
      workers{.own = own,
              .control = control,
              .device = device,
              .share = plan.share(own.rank()),
              .full = plan.options.scaling_config.virtual_workers ? 0 : plan.full_workers,
              .seed = plan.launch.flags().seed},
      data{.datasets = plan.options.datasets,
           .config = plan.options.dataset_config,
           .preprocessor = plan.options.preprocessor,
           .cursors = std::make_shared<data::Cursors>(counters.steps)},
      outputs{.store = std::optional<checkpoint::Store>(std::in_place, control, run.path(),
                                                        plan.options.run_config.checkpoint_config),
              .sinks = {workers.is_first(), run.path(), plan.progress, plan.first_epoch},
              .callbacks = observe::Callbacks(plan.options.run_config.callbacks),
              .config = plan.options.run_config.checkpoint_config,
              .first_worker = workers.is_first()},
      moments(std::make_shared<SessionStepListener>(*this)) {
  counters.steps->moments = moments;
  const auto& failure_config = plan.options.run_config.failure_config;
  if (failure_config.bad_numbers != BadNumbers::ignore)
    numbers = std::make_shared<BadNumbersWatch>(failure_config, control, counters.steps, bad_steps);
  if (workers.is_first()) stop.file = StopFile(run.path() / "stop");
  if (!outputs.config.async_save) return;
  freezables = std::make_shared<optim::Freezables>();
  if (!comm::threads_may_call_mpi() && workers.is_first())
    log::warn("async_save: MPI was started for one thread, so each report waits until its checkpoint is written");
}

SessionState::SessionState(const Plan& plan_, const RunFolder& run_, const Communicator& validators, at::Device device,
                           const Checkpoint& checkpoint)
    : plan(plan_),
      run(run_),
      workers{.own = validators,
              .control = validators,
              .device = device,
              .share = {.total = validators.size(), .first = validators.rank(), .count = 1},
              .seed = plan.launch.flags().seed},
      data{.datasets = plan.options.datasets,
           .config = {.split_all = true},
           .preprocessor = plan.options.preprocessor,
           .cursors = std::make_shared<data::Cursors>(counters.steps)},
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

}  // namespace muster::detail::train
