#include "muster/trainer.hpp"

#include "base/log.hpp"
#include "checkpoint/inspect.hpp"
#include "checkpoint/rollbacks.hpp"
#include "comm/agreement.hpp"
#include "comm/on_ranks.hpp"
#include "comm/timeout.hpp"
#include "group/backends.hpp"
#include "launch/settings.hpp"
#include "muster/process_group.hpp"
#include "run/failures.hpp"
#include "run/params.hpp"
#include "storage/tier.hpp"
#include "trainer/fit.hpp"
#include "trainer/trainable.hpp"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

namespace muster {
namespace {

void require_no_torch_config(const TrainerOptions& options, const char* fact) {
  if (Json(options.torch_config) != Json(TorchConfig{}))
    throw Error(ExitCode::usage, "choosing the backend of a trainer", detail::str("torch_config is set, and ", fact),
                "Use a TorchTrainer without backend_config, or leave torch_config out; --timeout and "
                "BackendConfig::timeout() say how long ranks wait");
}

/// Facts about a run that tell whether a start has changed it.
struct RunContent {
  int newest = -1;            ///< index of the newest checkpoint; -1 if there is none
  std::size_t rollbacks = 0;  ///< number of rollbacks

  bool is_new_since(const RunContent& before) const noexcept {
    return newest > before.newest || rollbacks > before.rollbacks;
  }
};

/// Reads a run's RunContent from its folder. If a part cannot be read, it and the following parts keep their defaults.
RunContent content_of(const detail::run::RunFolder& run) noexcept {
  RunContent content;
  try {
    content.newest = detail::run::newest_checkpoint_index(run.path());
    content.rollbacks = detail::checkpoint::read_rollbacks(run.path()).size();
  } catch (const std::exception&) {
  }
  return content;
}

/// Returns the state of the preprocessor in the newest checkpoint of a finished run; null, with a warning, if there is
/// no checkpoint that can be read.
Json saved_preprocessor(const std::filesystem::path& run) {
  namespace checkpoint = detail::checkpoint;
  std::string fact = "has no checkpoint";
  try {
    auto listing = detail::storage::tier_of(run)->list();
    if (const auto newest = checkpoint::newest_own(listing, checkpoint::read_rollbacks(run)))
      return checkpoint::preprocessor_state(newest->second);
  } catch (const Error& error) {
    fact = detail::str("has a checkpoint that cannot be read: ", error.what());
  }
  detail::log::warn("the finished run " + run.string() + " " + fact +
                    ". Its preprocessor is not fitted, so another trainer that uses it fits it anew");
  return nullptr;
}

/// Returns the state of rank 0's preprocessor on every rank; null if there is no preprocessor. If it is not fitted,
/// returns the result of otherwise(), which is called on rank 0. Collective.
template <class Otherwise>
Json preprocessor_of_first_rank(const detail::run::ResolvedOptions& resolved, Otherwise&& otherwise) {
  return detail::comm::run_on_root(resolved.world(), [&]() -> Json {
    const auto& preprocessor = resolved.options.preprocessor;
    if (!preprocessor) return nullptr;
    return preprocessor->fitted() ? preprocessor->state() : otherwise();
  });
}

/// For a run that is already finished: if the preprocessor is not fitted, loads its state from the run's checkpoint, so
/// that later trainers find it fitted, as after training. If the state does not fit the preprocessor, only warns, since
/// this run does not need it any more. Collective.
void restore_preprocessor(const detail::run::ResolvedOptions& resolved, const detail::run::RunFolder& run) {
  const auto state = preprocessor_of_first_rank(resolved, [&] { return saved_preprocessor(run.path()); });
  const auto& preprocessor = resolved.options.preprocessor;
  if (!preprocessor || preprocessor->fitted() || state.is_null()) return;
  try {
    preprocessor->load_state(state);
  } catch (const std::exception& error) {
    if (resolved.world().rank() == 0)
      detail::log::warn("the preprocessor is not that of the finished run " + run.path().string() + ": " +
                        error.what());
  }
}

/// Called after training: gives rank 0's preprocessor state to the ranks that have not trained. Collective.
void broadcast_preprocessor(const detail::run::ResolvedOptions& resolved) {
  if (resolved.worker_count == resolved.world().size()) return;
  const auto state = preprocessor_of_first_rank(resolved, [&] { return resolved.options.preprocessor->state(); });
  detail::comm::run_on_all(resolved.world(), [&] {
    const auto& preprocessor = resolved.options.preprocessor;
    if (preprocessor && !resolved.is_worker() && !preprocessor->fitted() && !state.is_null())
      preprocessor->load_state(state);
  });
}

class TorchBackendConfig final : public BackendConfig {
 public:
  explicit TorchBackendConfig(TorchConfig config) : config_(std::move(config)) {}
  std::unique_ptr<Backend> make_backend() const override { return std::make_unique<TorchBackend>(config_); }
  std::optional<std::chrono::milliseconds> timeout() const override { return config_.timeout; }

 private:
  TorchConfig config_;
};

}  // namespace

void TorchBackend::on_start(Session& session) {
  const bool on_gpu = session.get_device().is_cuda();
  ProcessGroupOptions options{.backend = session.flags().backend.value_or(config_.backend)};
  if (on_gpu) options.backend = detail::group::backends_for_gpus(options.backend, has_backend("nccl"));
  if (on_gpu && session.world_rank() == 0 && options.backend == "auto")
    detail::log::warn("this muster has no NCCL backend, so tensors go from GPU to GPU through the CPU and MPI");
  session.set_process_group(
      [workers = session.communicator(), options] { return make_process_group(workers, options); });
}

void TorchBackend::on_shutdown(Session& session) {
  if (!session.get_device().is_cuda() || session.failed()) return;
  // NCCL calls return before the GPU has finished them. Wait, since destroying a group aborts calls of the other ranks.
  at::detail::getCUDAHooks().deviceSynchronize(session.get_device().index());
  session.barrier();
}

DataParallelTrainer::DataParallelTrainer(Launch& launch, TrainLoop train_loop, TrainerOptions options)
    : train_loop_(std::move(train_loop)), options_(std::move(options)), launch_(&launch) {}

bool DataParallelTrainer::can_restore(const std::filesystem::path& path) {
  try {
    detail::run::saved_options(detail::run::absolute_path(path));
    return true;
  } catch (const Error& error) {
    if (error.code() != ExitCode::data) throw;
    return false;
  }
}

Trainable DataParallelTrainer::as_trainable() {
  const auto fit_one = [this](Launch& trial, const Config& config) {
    const auto restore = c10::make_scope_exit([this, launch = launch_, number = number_, options = options_] {
      launch_ = launch;
      number_ = number;
      options_ = options;
    });
    launch_ = &trial;
    number_ = 0;
    options_.train_loop_config =
        detail::launch::override_defaults(options_.train_loop_config, config, "choosing the settings of a trial");
    return fit();
  };
  return detail::trainer::TrainerTrainable{.fit = fit_one,
                                           .default_config = [this] { return options_.train_loop_config; }};
}

std::shared_ptr<const BackendConfig> DataParallelTrainer::backend_config() const {
  require_no_torch_config(options_, options_.backend_config ? "a backend_config is given beside it"
                                                            : "a DataParallelTrainer does not use torch's backend");
  return options_.backend_config;
}

Result DataParallelTrainer::fit() {
  using namespace detail::trainer;
  namespace comm = detail::comm;
  const auto& world = launch().communicator();
  std::shared_ptr<const BackendConfig> backend;
  comm::check_on_all(world, {.done = comm::timeout(world), .failed = comm::final_grace(world)}, [&] {
    setup();
    backend = backend_config();
  });
  if (number_ == 0) number_ = launch().next_trainer_number();
  auto options = options_;
  options.dataset_config = get_dataset_config();
  // Shared, since a validation function that does not return keeps using the options.
  const auto resolved =
      std::make_shared<const detail::run::ResolvedOptions>(detail::run::resolve(launch(), options, std::move(backend)));
  const auto run = std::make_shared<detail::run::RunFolder>(world, launch(), resolved->options.run_config, number_);
  const auto release = c10::make_scope_exit([&] { run->release(); });
  try {
    const comm::ScopedTimeout everywhere(world, resolved->timeout);
    const auto device = check_device_and_data(*resolved);
    detail::session::Validation validation(resolved, run, device);
    const auto before = run->params();
    const auto content_before = content_of(*run);
    if (!begin_run(*resolved, *run)) {
      const auto unfinished = validation.finish({}, /*has_trained=*/false);
      restore_preprocessor(*resolved, *run);
      auto result = read_result(*resolved, *run);
      result.error = unfinished;
      return result;
    }
    const auto ended = train_with_retries(*resolved, *run, device, train_loop_, validation);
    const auto unfinished = validation.finish(ended.error);
    if (before.is_object() && ended.error && detail::run::is_refusal(ended.error->code()) && world.rank() == 0 &&
        !content_of(*run).is_new_since(content_before))
      run->restore_params(before);
    auto result = finish_run(*resolved, *run, ended, unfinished);
    if (!ended.error) broadcast_preprocessor(*resolved);
    return result;
  } catch (const comm::RanksMissing& lost) {
    run->write_error(world, lost);
    throw;
  }
}

DataConfig DataParallelTrainer::get_dataset_config() const {
  auto merged = default_dataset_config();
  const auto& given = options_.dataset_config;
  if (given.datasets_to_split.given()) merged = {.datasets_to_split = given.datasets_to_split};
  if (given.split_all) merged.split_all = given.split_all;
  return merged;
}

TrainerOptions restored_options(const std::filesystem::path& path, TrainerOptions given) {
  return detail::run::restored_options(detail::run::absolute_path(path), std::move(given));
}

std::shared_ptr<const BackendConfig> detail::trainer::torch_backend(const TorchConfig& config) {
  return std::make_shared<TorchBackendConfig>(config);
}

std::shared_ptr<const BackendConfig> TorchTrainer::backend_config() const {
  if (options_.backend_config) return DataParallelTrainer::backend_config();
  return detail::trainer::torch_backend(options_.torch_config);
}

TorchTrainer TorchTrainer::restore(Launch& launch, const std::filesystem::path& path, TrainLoop train_loop,
                                   TrainerOptions options) {
  const bool own_backend = options.backend_config && Json(options.torch_config) == Json(TorchConfig{});
  auto restored = restored_options(path, std::move(options));
  if (own_backend) restored.torch_config = {};  // the saved one belongs to another backend
  const auto& run = restored.run_config;
  const auto named = detail::run::absolute_path(launch.flags().storage.value_or(run.storage_path) /
                                                launch.flags().name.value_or(run.name));
  std::error_code ignored;  // the folder may not exist
  if (named != run.storage_path / run.name && !std::filesystem::equivalent(named, run.storage_path / run.name, ignored))
    throw Error(ExitCode::usage, "restoring the run " + (run.storage_path / run.name).string(),
                "--storage and --name, or MUSTER_STORAGE and MUSTER_NAME, name another: " + named.string(),
                "Leave them out, or let them name the run");
  return {launch, std::move(train_loop), std::move(restored)};
}

}  // namespace muster
