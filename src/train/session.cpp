#include "muster/session.hpp"

#include "base/log.hpp"
#include "checkpoint/state/collect.hpp"
#include "muster/error.hpp"
#include "optim/optimizer_step.hpp"
#include "train/process_groups.hpp"
#include "train/random.hpp"
#include "train/session_state.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <ctime>

namespace muster {

using detail::train::SessionState;

State::State(SessionState& session, StateEntries entries)
    : session_(&session), entries_(std::make_shared<const StateEntries>(std::move(entries))) {}

bool State::restore() {
  auto& session = *session_;
  session.beginning_told = true;
  session.living = entries_;
  if (!session.start) return false;
  const auto& saved = session.read_start();
  if (!saved.trainer.of_a_run) return session.restore_what_is_there(*entries_);
  detail::checkpoint::restore(*entries_, saved.state, {session.workers.rank(), session.workers.size()});
  session.restore_progress(saved.trainer);
  session.restore_random_state(saved);
  return true;
}

Epochs::iterator Epochs::begin() const {
  session_->epochs = count_;
  if (session_->epoch < count_) session_->passes->begin_epoch(session_->epoch);
  return {session_, session_->epoch};
}

Epochs::iterator Epochs::end() const { return {session_, count_}; }

Epochs::iterator& Epochs::iterator::operator++() {
  session_->sinks.tell(&detail::observe::Sink::epoch, epoch_);
  if (epoch_ + 1 < session_->epochs) session_->heed_stop();
  if (++epoch_ < session_->epochs) {
    session_->epoch = epoch_;
    session_->passes->begin_epoch(epoch_);
  }
  return *this;
}

struct Evaluation::Saved {
  at::NoGradGuard no_grad;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes;  // parents before children
};

Evaluation::Evaluation(std::shared_ptr<torch::nn::Module> module) : saved_(std::make_unique<Saved>()) {
  for (const auto& part : module->modules()) saved_->modes.emplace_back(part, part->is_training());
  module->eval();
}

Evaluation::~Evaluation() {
  for (const auto& [module, training] : saved_->modes) module->train(training);
}

int Session::world_size() const noexcept { return state_->workers.size(); }
int Session::world_rank() const noexcept { return state_->workers.rank(); }
int Session::local_rank() const noexcept { return state_->workers.topology().local_rank; }
int Session::local_world_size() const noexcept { return state_->workers.topology().local_size; }
int Session::node_rank() const noexcept { return state_->workers.topology().node_rank; }
int Session::num_nodes() const noexcept { return state_->workers.topology().num_nodes; }
const std::string& Session::trial_name() const noexcept { return state_->run.name(); }
const std::string& Session::experiment_name() const noexcept { return state_->run.name(); }
const Json& Session::metadata() const noexcept { return state_->metadata; }
std::uint64_t Session::seed() const noexcept { return state_->launch.flags().seed; }
std::int64_t Session::global_step() const noexcept { return state_->global_step; }
at::Device Session::get_device() const { return state_->device; }
const Communicator& Session::communicator() const noexcept { return state_->workers; }
void Session::barrier() const { state_->workers.barrier(); }

c10::intrusive_ptr<c10d::ProcessGroup> Session::process_group() const {
  if (!state_->groups)
    throw Error(ExitCode::user_error, "taking the process group", "this trainer's backend made none",
                "Use TorchTrainer");
  return state_->groups->own;
}

at::Tensor Session::mean(const at::Tensor& value) const {
  std::vector<at::Tensor> tensors{value.detach().clone()};
  process_group()->allreduce(tensors)->wait();  // not AVG, which gloo does not know
  return tensors.front().div_(world_size());
}

void Session::prepare(const std::shared_ptr<torch::nn::Module>& module, const ModelOptions& options) {
  // Who asks for gloo gets gloo.
  const bool share_memory = process_group()->getBackendType() != c10d::ProcessGroup::BackendType::GLOO;
  const bool spare_core = state_->launch.cpus_per_rank() > at::get_num_threads();
  state_->models.push_back(detail::gradients::DataParallel::prepare(
      module,
      {.communicator = state_->workers,
       .new_group = state_->groups->make,
       .weight = state_->passes->weight,
       .no_sync_depth = state_->no_sync_depth,
       .wishes_to_stop = [state = state_] { return state->launch.stop_requested(); },
       .device = state_->device,
       .share_memory = share_memory,
       .spare_core = spare_core,
       .share = state_->share},
      options));
}

std::unique_ptr<detail::optim::OptimizerStep> Session::prepare_step(torch::optim::Optimizer& optimizer,
                                                                    const OptimizerOptions& options) {
  return detail::optim::make_optimizer_step(optimizer, state_->models, options);
}

StepScope::StepScope(std::shared_ptr<detail::data::Passes> passes, std::shared_ptr<const detail::step::StepWeight> step)
    : passes_(std::move(passes)), scope_(passes_->enter(std::move(step))) {}

StepScope::~StepScope() { passes_->leave(scope_); }

StepScope Session::step_of(std::shared_ptr<const detail::step::StepWeight> step) const {
  return {state_->passes, std::move(step)};
}

NoSync Session::no_sync() const {
  if (state_->share.fixed)
    throw Error(ExitCode::usage, "adding up gradients without averaging", "virtual workers do that themselves",
                "Choose a larger batch_size, or no virtual_workers");
  return NoSync(state_->no_sync_depth);
}

Join Session::join(const JoinOptions& options) const {
  if (state_->share.fixed)
    throw Error(ExitCode::usage, "joining ranks", "virtual workers have as many batches on every rank",
                "Take the data from get_dataset_shard(), or choose no virtual_workers");
  return Join(state_->models, options);
}

Autocast Session::autocast(const AutocastOptions& options) const { return Autocast(state_->device.type(), options); }

GradScaler Session::grad_scaler(const GradScalerOptions& options) const {
  return GradScaler(state_->workers.duplicate(), state_->device, options);
}

Evaluation Session::evaluation(std::shared_ptr<torch::nn::Module> module) const {
  for (const auto& prepared : state_->models)
    if (prepared->module() == module.get()) prepared->synchronise_buffers();
  return Evaluation(std::move(module));
}

Worker Session::worker() const {
  if (state_->share.fixed)
    throw Error(ExitCode::usage, "preparing a data loader", "it knows nothing of virtual workers",
                "Take the data from get_dataset_shard(), or choose no virtual_workers");
  return {
      .rank = world_rank(), .world = world_size(), .seed = seed(), .device = state_->device, .passes = state_->passes};
}

DatasetShard Session::get_dataset_shard(const std::string& name) const { return DatasetShard(state_->shard(name)); }
State Session::state(StateEntries entries) const { return State(*state_, std::move(entries)); }
Epochs Session::epochs(std::int64_t count) const { return Epochs(*state_, count); }
std::optional<Checkpoint> Session::get_checkpoint() const {
  state_->checkpoint_taken = true;
  if (!state_->newest) return {};
  return state_->store.as_this_rank(*state_->newest);
}

bool Session::should_stop() {
  if (!state_->stop.known())
    state_->stop.hear(state_->control.all_reduce(std::int64_t{state_->launch.stop_requested()}, ReduceOp::max) != 0);
  return state_->stop_told = state_->stop.known();
}

bool Session::failed() const noexcept { return state_->failed; }

void Session::report(const Metrics& metrics, const ReportOptions& options) {
  state_->report(metrics, nullptr, std::nullopt, options);
}
void Session::report(const Metrics& metrics, const State& state, const ReportOptions& options) {
  state_->living = state.entries_;
  state_->report(metrics, &state.entries(), std::nullopt, options);
}
void Session::report(const Metrics& metrics, const Checkpoint& checkpoint, const ReportOptions& options) {
  state_->report(metrics, nullptr, checkpoint, options);
}
void Session::report(const Metrics& metrics, const State& state, const Checkpoint& checkpoint,
                     const ReportOptions& options) {
  state_->living = state.entries_;
  state_->report(metrics, &state.entries(), checkpoint, options);
}

}  // namespace muster
