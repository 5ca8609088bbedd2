#include "muster/data_parallel.hpp"

#include "base/file.hpp"
#include "base/log.hpp"
#include "base/run_names.hpp"
#include "checkpoint/store.hpp"
#include "comm/agreement.hpp"
#include "comm/make_world.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/on_ranks.hpp"
#include "comm/progress.hpp"
#include "comm/timeout.hpp"
#include "gradients/prepared_model.hpp"
#include "group/backends.hpp"
#include "launch/binding.hpp"
#include "launch/launcher.hpp"
#include "muster/error.hpp"
#include "muster/process_group.hpp"
#include "optim/optimizer_step.hpp"
#include "state/collect.hpp"
#include "state/replication.hpp"
#include "state/training_position.hpp"
#include "step/steps.hpp"
#include "watch/record.hpp"

#include <ATen/Parallel.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
#include <optional>
#include <system_error>
#include <vector>

namespace muster {

using namespace detail;

namespace {

c10::Device device_of(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  return parameters.empty() ? c10::Device(c10::kCPU) : parameters.front().device();
}

/// Makes a world for one DataParallel, so that its alarms and timeout do not affect other users of `ranks`. Collective.
Communicator make_own_world(const Communicator& ranks, const DataParallelOptions& options) {
  constexpr auto doing = "preparing a model";
  comm::require_mpi(doing);
  std::optional<comm::ScopedTimeout> while_joining;
  if (options.timeout.count() > 0) while_joining.emplace(ranks, options.timeout);
  auto own = comm::make_separate_world(ranks);
  comm::require_same_options(own, "DataParallel", {{"timeout_ms", options.timeout.count()}});
  if (options.timeout.count() <= 0)
    throw Error(ExitCode::usage, doing, detail::str("the timeout is ", options.timeout.count(), " ms"),
                "Give the longest wait for other ranks, such as 60s");
  return own;
}

/// True if this rank has a core that torch's threads do not use. Collective.
bool has_spare_core(const Communicator& ranks) {
  const auto node = launch::find_node_ranks(ranks);
  return launch::threads_for(node.masks, ranks.topology().local_rank, node.quota) > at::get_num_threads();
}

/// Refuses folders of runs, of sweeps and of single checkpoints: save() would remove the checkpoints of a run in them.
void require_own_folder(const std::filesystem::path& folder) {
  for (const auto* const name : {run_names::params, run_names::history, run_names::sweep, "manifest.json"})
    if (std::filesystem::exists(status_of(folder / name)))
      throw Error(ExitCode::usage, "using the folder " + folder.string(), detail::str("it has a ", name, " of muster"),
                  "Give DataParallel a folder of its own; Checkpoint::load() loads from the checkpoints of runs");
}

}  // namespace

struct DataParallel::State {
  explicit State(const Communicator& world) : ranks(world) {}

  const Communicator ranks;
  const std::shared_ptr<step::Steps> steps = std::make_shared<step::Steps>();
  const std::shared_ptr<int> no_sync_depth = std::make_shared<int>(0);
  const int exceptions = std::uncaught_exceptions();  ///< number of uncaught exceptions when this was made
  std::vector<std::shared_ptr<gradients::PreparedModel>> models = {};  ///< one model; Join and optimizers take a list

  /// Returns the absolute path. Throws an Error if it is empty or the ranks name different folders. Collective.
  std::filesystem::path folder(const std::filesystem::path& given) const {
    constexpr auto doing = "saving or loading a state";
    comm::require_mpi(doing);
    std::error_code gone;  // the path is empty if the working directory is gone
    auto path = given.empty() ? given : std::filesystem::absolute(given, gone).lexically_normal();
    comm::require_same_options(ranks, "a save or a load", {{"folder", path.string()}});
    if (path.empty())
      throw Error(ExitCode::usage, doing, "the folder has no name, or the working directory is gone",
                  "Give the folder's whole path");
    return path;
  }
  checkpoint::CheckpointStore store(const std::filesystem::path& folder) const {
    return {ranks, folder, CheckpointConfig{.num_to_keep = 1}};
  }
};

DataParallel::DataParallel(const Communicator& ranks, std::shared_ptr<torch::nn::Module> module,
                           const DataParallelOptions& options) {
  state_ = std::make_unique<State>(make_own_world(ranks, options));
  const auto& own = state_->ranks;
  log::configure_if_unset(own.rank());
  const watch::ScopedCallName prepare("DataParallel");
  try {
    if (!module)
      throw Error(ExitCode::usage, "preparing a model", "the module is null", "Make the model first, on every rank");
    const auto device = device_of(*module);
    const auto backend = device.is_cuda() ? group::backends_for_gpus("auto", has_backend("nccl")) : "auto";
    state_->models.push_back(gradients::PreparedModel::prepare(
        std::move(module),
        {.communicator = own,
         .new_group = [own, backend] { return make_process_group(own, {.backend = backend}); },
         .steps = state_->steps,
         .no_sync_depth = state_->no_sync_depth,
         .device = device,
         .spare_core = has_spare_core(own),
         .share = {.total = own.size(), .first = own.rank()}},
        options.model));
  } catch (...) {
    if (const auto mine = comm::current_outcome(); !mine.agreed) comm::raise_alarm(own, mine);
    throw;
  }
}

DataParallel::~DataParallel() {
  if (std::uncaught_exceptions() <= state_->exceptions || comm::mpi_is_finalised() || comm::is_forked()) return;
  try {
    comm::throw_if_alarm_raised(state_->ranks);
    comm::raise_alarm(state_->ranks, {.kind = comm::Outcome::Kind::failed,
                                      .code = ExitCode::user_error,
                                      .text = "an exception has ended its part in averaging gradients"});
  } catch (const RemoteError&) {  // another rank has raised an alarm already, which reaches all ranks
  } catch (const std::exception& error) {
    log::warn(error.what());
  }
}

optim::Prepared DataParallel::prepare_step(torch::optim::Optimizer& optimizer, const OptimizerOptions& options) {
  comm::require_mpi("preparing an optimizer");
  optim::require_same_options(state_->ranks, options);
  return optim::make_optimizer_step(optimizer, state_->models, options);
}

NoSync DataParallel::no_sync() const { return NoSync(state_->no_sync_depth); }
StepScope DataParallel::step(double weight) const { return {state_->steps, step::with_weight(nullptr, weight)}; }

Join DataParallel::join(const JoinOptions& options) const {
  comm::require_mpi("joining ranks");
  comm::require_same_options(state_->ranks, "join",
                             {{"divide_by_initial_world_size", options.divide_by_initial_world_size}});
  return Join(state_->models, options);
}

void DataParallel::average_buffers() {
  comm::require_mpi("averaging buffers");
  state_->models.front()->synchronise_buffers();
}

void DataParallel::save(const std::filesystem::path& folder, const StateEntries& state) {
  const watch::ScopedCallName save("save");
  const auto path = state_->folder(folder);
  checkpoint::CheckpointContents contents{.position_json =
                                              state::to_json({.epoch_complete = false, .epoch_counted = false})};
  state::gather(state);
  comm::run_on_all(state_->ranks, [&] {
    if (state_->ranks.rank() == 0) {
      require_own_folder(path);
      make_directories(path);
    }
    state::require_own_weights(state);
    contents.state = state::collect(state);
    contents.replication = state::replication_of(state);
  });
  state_->store(path).commit(std::move(contents));
}

bool DataParallel::load(const std::filesystem::path& folder, const StateEntries& state) {
  const watch::ScopedCallName load("load");
  const auto path = state_->folder(folder);
  const auto& ranks = state_->ranks;
  const bool exists = comm::run_on_root(ranks, [&] {
    require_own_folder(path);
    return std::filesystem::exists(status_of(path));
  });
  if (!exists) return false;
  auto store = state_->store(path);
  const auto newest = store.newest();
  if (!newest) return false;
  const auto saved = store.read(*newest);
  const state::RankInGroup here{ranks.rank(), ranks.size()};
  comm::run_on_all(ranks, [&] { state::require_fit(state, saved.state, here, saved.per_rank); });
  comm::run_on_all(ranks, [&] { state::restore(state, saved.state, here, saved.per_rank); });
  return true;
}

}  // namespace muster
