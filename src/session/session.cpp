#include "muster/session.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "comm/on_ranks.hpp"
#include "comm/rank_status.hpp"
#include "muster/detail/worker.hpp"
#include "muster/error.hpp"
#include "optim/optimizer_step.hpp"
#include "session/session_state.hpp"
#include "watch/record.hpp"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cmath>
#include <set>

namespace muster {

/// The process groups that the backend has made for the session. Defined only in this file, since c10d's header is
/// large.
struct detail::session::ProcessGroups {
  /// Makes a new group over the workers. Collective.
  std::function<c10::intrusive_ptr<c10d::ProcessGroup>()> make = {};
  /// The group for the training function.
  c10::intrusive_ptr<c10d::ProcessGroup> own = {};
};

using detail::session::SessionState;
using detail::watch::ScopedCallName;

State::State(SessionState& session, StateEntries entries)
    : session_(&session), entries_(std::make_shared<const StateEntries>(std::move(entries))) {}

bool State::restore() {
  const ScopedCallName restore("restore");
  return session_->restore(entries_);
}

Epochs::iterator Epochs::begin() const {
  session_->throw_if_ended();
  using namespace detail::step;
  auto& current = session_->progress.steps->epoch;
  const bool again = current.number == current.last_loop_end;
  const auto epoch = current.count == EpochCount::none_in_state ? 0 : current.number + (again ? 1 : 0);
  session_->progress.epoch_count = count_;
  if (again && epoch >= count_ && session_->workers.is_first())
    detail::log::warn(detail::str("session.epochs(", count_, ") has no epoch left: an earlier loop has ended after ",
                                  detail::counted(epoch, "epoch"),
                                  ". Epochs are counted over the whole run; for n more, loop over session.epochs(",
                                  epoch, " + n)"));
  if (epoch < count_) {
    session_->saved_values.forget();  // a resumed run repeats what the program does before the loop
    session_->data.pass_positions->enter_loop();
    session_->begin_epoch(epoch);
  } else if (current.loop == EpochLoop::none) {
    current.loop = EpochLoop::none_left;
  }
  return {session_, epoch};
}

Epochs::iterator Epochs::end() const { return {session_, count_}; }

Epochs::iterator& Epochs::iterator::operator++() {
  session_->throw_if_ended();
  if (const auto name = session_->data.pass_positions->name_of_pass_not_resumed(/*in_loop=*/true); !name.empty())
    throw Error(
        ExitCode::user_error, "resuming the pass over \"" + name + "\"",
        detail::str("the run was saved in the middle of it, but epoch ", epoch_,
                    " has ended without it: the passes that were finished before it are empty now, and no other pass "
                    "has begun"),
        "Make the same passes in an epoch at every start. Passes that only a fresh start makes belong before "
        "the loop over session.epochs(), or under torch::NoGradGuard");
  if (const auto name = session_->data.pass_positions->name_of_unused_position();
      !name.empty() && session_->workers.is_first())
    detail::log::warn(
        detail::str("data \"", name, "\": the run was saved in the middle of epoch ", epoch_,
                    ", and since the start the epoch has ended without a pass over these data. If they have another "
                    "name now, the epoch has trained on a part of them twice: names stay the same between starts"));
  auto& rest = session_->progress.unfinished_pass;
  if (!rest.dataset.empty() && rest.step == session_->progress.steps->global_step &&
      !std::exchange(rest.warned, true) && session_->workers.is_first())
    detail::log::warn(detail::str(
        "dataset \"", rest.dataset, "\": the last State of epoch ", epoch_,
        " was reported in the middle of a pass that the epoch then left, so a run that goes on from there "
        "makes the rest of the pass. Put the range and its iterators into a scope of their own, which ends before "
        "the report"));
  session_->data.pass_positions->end_epoch();
  session_->outputs.observers.tell(&detail::observe::Observer::epoch, epoch_);
  if (epoch_ + 1 >= session_->progress.epoch_count) {
    session_->progress.steps->epoch.last_loop_end = epoch_++;
    session_->progress.steps->epoch.loop = detail::step::EpochLoop::after;
    return *this;
  }
  ++epoch_;
  session_->progress.is_between_epochs = true;
  session_->stop_if_asked();
  session_->progress.is_between_epochs = false;
  session_->begin_epoch(epoch_);
  return *this;
}

struct Evaluation::Saved {
  at::NoGradGuard no_grad;
  // Each module and its mode. Parents come first, since train() also sets the mode of the children.
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes;
};

Evaluation::Evaluation(std::shared_ptr<torch::nn::Module> module) : saved_(std::make_unique<Saved>()) {
  for (const auto& part : module->modules()) saved_->modes.emplace_back(part, part->is_training());
  module->eval();
}

Evaluation::~Evaluation() {
  for (const auto& [module, training] : saved_->modes) module->train(training);
}

int Session::world_size() const noexcept { return communicator().size(); }
int Session::world_rank() const noexcept { return communicator().rank(); }
int Session::local_rank() const noexcept { return communicator().topology().local_rank; }
int Session::local_world_size() const noexcept { return communicator().topology().local_size; }
int Session::node_rank() const noexcept { return communicator().topology().node_rank; }
int Session::num_nodes() const noexcept { return communicator().topology().num_nodes; }
const std::string& Session::trial_name() const noexcept { return state_->run.name(); }
const std::string& Session::experiment_name() const noexcept { return state_->run.name(); }
const Json& Session::metadata() const noexcept { return state_->resolved.options.metadata; }
std::uint64_t Session::seed() const noexcept { return state_->workers.seed; }
std::int64_t Session::global_step() const noexcept { return state_->progress.steps->global_step; }
bool Session::is_step_complete() const noexcept { return state_->progress.steps->is_step_complete(); }
at::Device Session::get_device() const { return state_->workers.device; }
const Communicator& Session::communicator() const noexcept { return state_->workers.communicator; }
void Session::keep_alive(std::chrono::milliseconds time) const { detail::comm::keep_alive(communicator(), time); }
void Session::barrier() const {
  state_->throw_if_ended();
  communicator().barrier();
}

c10::intrusive_ptr<c10d::ProcessGroup> Session::process_group() const {
  if (!state_->process_groups)
    throw Error(ExitCode::user_error, "taking the process group", "this trainer's backend made none",
                "Use TorchTrainer, or give the session one in Backend::on_start");
  return state_->process_groups->own;
}

at::Tensor Session::mean(const at::Tensor& value) const {
  state_->throw_if_ended();
  if (!value.defined())
    throw Error(ExitCode::user_error, "taking the mean over the workers", "the tensor is undefined",
                "Give it a value on every worker");
  const auto type = value.scalar_type();
  const bool whole = at::isIntegralType(type, /*includeBool=*/true);
  // The sum may overflow the type even if the mean does not. So doubles are summed, scaled by a power of two, which is
  // exact.
  const auto wide = at::isComplexType(type) ? at::kComplexDouble : at::kDouble;
  const double scale = std::exp2(-std::ceil(std::log2(world_size())));
  std::vector<at::Tensor> tensors{value.detach().to(wide).mul(scale)};
  process_group()->allreduce(tensors)->wait();  // not ReduceOp::AVG, which gloo does not have
  return tensors.front().div_(world_size() * scale).to(whole ? wide : type);
}

void Session::prepare(const std::shared_ptr<torch::nn::Module>& module, const ModelOptions& options) {
  const ScopedCallName prepare("prepare_model");
  state_->throw_if_ended();
  // If the user has chosen gloo, gradients must go through gloo.
  const bool share_memory = process_group()->getBackendType() != c10d::ProcessGroup::BackendType::GLOO;
  const bool spare_core = state_->resolved.cpus_per_rank > at::get_num_threads();
  state_->models.add(detail::gradients::PreparedModel::prepare(
      module,
      {.communicator = communicator(),
       .new_group = state_->process_groups->make,
       .steps = state_->progress.steps,
       .no_sync_depth = state_->models.no_sync_depth(),
       // In a validation's session, stopper must not be used: the launch may be gone if the validation was given up.
       .stop_requested = [state = state_] { return state->outputs.store && state->stopper.is_asked_here(); },
       .device = get_device(),
       .share_memory = share_memory,
       .spare_core = spare_core,
       .share = state_->workers.share},
      options));
}

detail::optim::Prepared Session::prepare_step(torch::optim::Optimizer& optimizer, const OptimizerOptions& options) {
  state_->throw_if_ended();
  detail::optim::require_same_options(communicator(), options);
  const auto& numbers = state_->bad_numbers;
  return detail::optim::make_optimizer_step(optimizer, state_->models.all(), options,
                                            {.numbers = numbers,
                                             .optimizer_number = numbers ? numbers->add_optimizer(optimizer) : 0,
                                             .snapshot_sources = state_->saver.snapshot_sources(),
                                             .last_rates = state_->models.last_rates()});
}

StepScope Session::step_of(std::shared_ptr<const detail::step::BatchWeight> batch) const {
  state_->throw_if_ended();
  return {state_->progress.steps, std::move(batch)};
}

StepScope Session::step_of(const std::shared_ptr<const detail::step::BatchWeight>& batch, double weight) const {
  return step_of(detail::step::with_weight(batch, weight));
}

NoSync Session::no_sync() const {
  if (state_->workers.share.fixed)
    throw Error(ExitCode::usage, "adding up gradients without averaging", "virtual workers do that themselves",
                "Choose a larger batch_size, or no virtual_workers");
  return NoSync(state_->models.no_sync_depth());
}

Join Session::join(const JoinOptions& options) const {
  state_->throw_if_ended();
  if (state_->workers.share.fixed)
    throw Error(ExitCode::usage, "joining ranks", "virtual workers have as many batches on every rank",
                "Take the data from get_dataset_shard(), or choose no virtual_workers");
  detail::comm::require_same_options(communicator(), "join",
                                     {{"divide_by_initial_world_size", options.divide_by_initial_world_size}});
  return Join(state_->models.all(), options);
}

Autocast Session::autocast(const AutocastOptions& options) const { return Autocast(get_device().type(), options); }

GradScaler Session::grad_scaler(const GradScalerOptions& options) const {
  state_->throw_if_ended();
  detail::comm::require_same_options(communicator(), "a gradient scaler",
                                     {{"init_scale", options.init_scale},
                                      {"growth_factor", options.growth_factor},
                                      {"backoff_factor", options.backoff_factor},
                                      {"growth_interval", options.growth_interval},
                                      {"enabled", options.enabled}});
  for (const auto& model : state_->models.all())
    for (const auto& item : model->module()->named_parameters())
      if (options.enabled && item.value().defined() && item.value().requires_grad() && item.value().is_complex())
        throw Error(ExitCode::usage, "making a gradient scaler", "the parameter " + item.key() + " is complex",
                    "Train this model without a scaler, in bfloat16 or float");
  return GradScaler(communicator().duplicate(), get_device(), options);
}

Evaluation Session::evaluation(std::shared_ptr<torch::nn::Module> module) const {
  state_->throw_if_ended();
  // `module` may be a part of a prepared model, or may contain several prepared models.
  std::set<const torch::nn::Module*> parts;
  for (const auto& part : module->modules()) parts.insert(part.get());
  for (const auto& prepared : state_->models.all())
    if (std::ranges::any_of(prepared->module()->modules(),
                            [&](const auto& part) { return parts.contains(part.get()); }))
      prepared->synchronise_buffers();
  return Evaluation(std::move(module));
}

detail::data::Worker detail::data::worker_of(const Session& session) {
  const auto& workers = session.state_->workers;
  if (workers.share.fixed)
    throw Error(ExitCode::usage, "preparing a data loader", "it knows nothing of virtual workers",
                "Take the data from get_dataset_shard(), or choose no virtual_workers");
  return {.rank = workers.rank(),
          .world = workers.size(),
          .full_worker_count = workers.full_worker_count,
          .seed = workers.seed,
          .device = workers.device,
          .pass_positions = session.state_->data.pass_positions};
}

DatasetShard Session::get_dataset_shard(const std::string& name) const {
  return DatasetShard(state_->data.shard(name, state_->workers));
}
State Session::state(StateEntries entries) const { return State(*state_, std::move(entries)); }
Epochs Session::epochs(std::int64_t count) const {
  state_->require_training("counting epochs");
  if (count < 0)
    throw Error(ExitCode::usage, "counting epochs", detail::str(count, " is not a number of epochs"),
                "Loop over 1 or more");
  if (count == 0 && state_->workers.is_first()) detail::log::warn("session.epochs(0) trains for no epoch");
  return Epochs(*state_, count);
}
std::optional<Checkpoint> Session::get_checkpoint() const {
  state_->resumer.note_given_to_user();
  const auto& outputs = state_->outputs;
  const auto newest = outputs.wait_for_newest();
  if (!newest || !outputs.store) return newest;
  return outputs.store->as_this_rank(*newest);
}

static void require_log_name(const std::string& name) {
  if (name.empty() || !detail::is_utf8(name))
    throw Error(ExitCode::user_error, "logging a value", name.empty() ? "it has no name" : "its name is not UTF-8",
                "Give it a name, such as \"loss/train\"");
}

void Session::log_scalar(const std::string& name, double value) const {
  require_log_name(name);
  state_->outputs.observers.tell(&detail::observe::Observer::scalar, name, value,
                                 state_->progress.shown_step(state_->progress.training_iteration + 1));
}

void Session::log_image(const std::string& name, const at::Tensor& image) const {
  require_log_name(name);
  constexpr std::int64_t max_side = 65'535;
  const auto has_shape = [&] {
    if (!image.defined() || image.numel() == 0 || image.dim() < 2 || image.dim() > 3) return false;
    if (image.size(-1) > max_side || image.size(-2) > max_side) return false;
    return image.dim() == 2 || image.size(0) == 1 || image.size(0) == 3 || image.size(0) == 4;
  };
  if (!has_shape() || !(image.scalar_type() == at::kByte || at::isFloatingType(image.scalar_type())))
    throw Error(
        ExitCode::user_error, "logging the picture " + name,
        !image.defined() ? "the tensor is undefined"
                         : c10::str("it is of type ", image.scalar_type(), " and shape ", image.sizes()),
        "Give bytes, or floating-point numbers from 0 to 1, as [height, width] or [channels, height, width] with "
        "1, 3 or 4 channels and at most 65535 rows and columns");
  state_->outputs.observers.tell(&detail::observe::Observer::image, name, image,
                                 state_->progress.shown_step(state_->progress.training_iteration + 1));
}

void Session::add_callback(std::shared_ptr<Callback> callback) { state_->add_callback(std::move(callback)); }

bool Session::should_stop() {
  const ScopedCallName ask("should_stop");
  state_->require_training("asking whether to stop");
  return state_->stopper.should_stop();
}
Preemption Session::preemption() {
  const ScopedCallName ask("preemption");
  state_->require_training("asking for a preemption");
  return state_->stopper.preemption();
}

std::vector<ReportedCheckpoint> Session::get_all_reported_checkpoints() const {
  const ScopedCallName list("get_all_reported_checkpoints");
  state_->require_training("looking for the run's checkpoints");
  return state_->saver.reported_checkpoints();
}

Json Session::broadcast_from_rank_zero(const Json& value) const {
  state_->throw_if_ended();
  return detail::json_from_cbor(communicator().broadcast(world_rank() == 0 ? detail::json_to_cbor(value) : ""));
}

std::filesystem::path Session::artifacts() const {
  state_->run.require_not_replaced();
  auto folder = state_->run.path() / "artifacts";
  detail::make_directories(folder);
  detail::require_own_directory(folder);
  return folder;
}

const LaunchFlags& Session::flags() const noexcept { return state_->resolved.flags; }

void Session::set_process_group(std::function<c10::intrusive_ptr<c10d::ProcessGroup>()> make) {
  auto own = make();
  state_->process_groups = std::make_shared<detail::session::ProcessGroups>(
      detail::session::ProcessGroups{.make = std::move(make), .own = std::move(own)});
}

bool Session::failed() const noexcept { return state_->has_failed; }

void Session::report(const Metrics& metrics, const ReportOptions& options) {
  state_->report({.metrics = metrics, .options = options});
}
void Session::report(const Metrics& metrics, const State& state, const ReportOptions& options) {
  state_->report({.metrics = metrics, .entries = state.entries_, .options = options});
}
void Session::report(const Metrics& metrics, const Checkpoint& checkpoint, const ReportOptions& options) {
  state_->report({.metrics = metrics, .checkpoint = checkpoint, .options = options});
}
void Session::report(const Metrics& metrics, const State& state, const Checkpoint& checkpoint,
                     const ReportOptions& options) {
  state_->report({.metrics = metrics, .entries = state.entries_, .checkpoint = checkpoint, .options = options});
}

}  // namespace muster
