#include "muster/trainer.hpp"

#include "base/file.hpp"
#include "base/log.hpp"
#include "checkpoint/inspect.hpp"
#include "checkpoint/rollbacks.hpp"
#include "checkpoint/tier.hpp"
#include "comm/agreement.hpp"
#include "comm/on_ranks.hpp"
#include "comm/world.hpp"
#include "data/source.hpp"
#include "launch/settings.hpp"
#include "muster/version.hpp"
#include "observe/history.hpp"
#include "train/attempt.hpp"
#include "train/params.hpp"
#include "train/random.hpp"
#include "train/run.hpp"
#include "train/same_data.hpp"
#include "train/session_state.hpp"

#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

namespace muster {

using namespace std::chrono_literals;
using detail::train::Run;
using detail::train::SessionState;

namespace {

/// Ranks that do not train wait for as long as it takes.
constexpr auto spare_patience = std::chrono::hours(24 * 365);
/// How long the others may take to hear of a failure after which nothing is tried again.
constexpr auto last_grace = 30s;

class TorchBackendConfig final : public BackendConfig {
 public:
  explicit TorchBackendConfig(TorchConfig config) : config_(std::move(config)) {}
  std::unique_ptr<Backend> make_backend() const override { return std::make_unique<TorchBackend>(config_); }
  const TorchConfig& config() const noexcept { return config_; }
  std::optional<std::chrono::milliseconds> timeout() const override { return config_.timeout; }

 private:
  TorchConfig config_;
};

/// The one limit of all waits of a trainer.
std::chrono::milliseconds choose_limit(const Launch& launch, const BackendConfig* backend) {
  const auto own = backend == nullptr ? std::nullopt : backend->timeout();
  if (own && own->count() <= 0)
    throw Error(ExitCode::usage, "choosing how long ranks wait for each other",
                std::to_string(own->count()) + " ms is no time",
                "Give TorchConfig::timeout more than 0, or leave it out");
  return launch.flags().timeout.value_or(own.value_or(detail::comm::time_limit(launch.communicator())));
}

int count_workers(const Launch& launch, const ScalingConfig& scaling) {
  const auto& flags = launch.flags();
  const int workers = flags.workers.value_or(scaling.num_workers.value_or(launch.size()));
  if (workers < 1)
    throw Error(ExitCode::usage, "choosing the workers", std::to_string(workers) + " is not a number of workers",
                "Ask for 1 or more");
  if (workers > launch.size())
    throw Error(ExitCode::usage, "choosing the workers",
                std::to_string(workers) + " workers were asked for and the launch has " +
                    std::to_string(launch.size()) + (launch.size() == 1 ? " rank" : " ranks"),
                "Start it with mpirun -n " + std::to_string(workers) + ", or ask for fewer with --workers");
  return workers;
}

/// What each worker takes of a step.
detail::step::StepShare choose_share(const ScalingConfig& scaling, int workers, int rank) {
  if (!scaling.virtual_workers) return {.total = workers, .first = rank, .count = 1};
  const int total = *scaling.virtual_workers;
  if (total < 1 || total % workers != 0)
    throw Error(ExitCode::usage, "choosing the workers",
                std::to_string(total) + " virtual workers cannot be divided evenly among " + std::to_string(workers),
                "Start as many workers as divide them; 12 goes with 1, 2, 3, 4, 6 and 12");
  const int count = total / workers;
  return {.total = total, .first = rank * count, .count = count, .fixed = true};
}

/// Threads of torch on each worker.
int threads_of(const Launch& launch, const ScalingConfig& scaling) {
  return launch.flags().threads.value_or(scaling.threads_per_worker.value_or(launch.threads_per_rank()));
}

/// How many nodes have a worker. Workers are the lowest ranks of the world.
int nodes_of(const Topology& world, int workers) {
  return static_cast<int>(std::set<int>(world.node_of_rank.begin(), world.node_of_rank.begin() + workers).size());
}

at::Device choose_device(const ScalingConfig& scaling, const Communicator& workers) {
  if (!scaling.use_gpu) return at::kCPU;
  const int gpus = at::detail::getCUDAHooks().deviceCount();
  if (gpus < 1)
    throw Error(ExitCode::data, "choosing the device",
                "use_gpu is set and host " + workers.topology().hosts[static_cast<std::size_t>(workers.rank())] +
                    " has no GPU that this libtorch can use",
                "Set use_gpu to false, or run where there is a GPU with a CUDA build of libtorch");
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(workers.topology().local_rank % gpus));
}

Json describe(const Launch& launch, const DataParallelTrainerOptions& options, const Run& run, int workers) {
  Json datasets = Json::object();
  if (launch.rank() < workers)
    for (const auto& [name, dataset] : options.datasets) datasets[name] = {{"samples", dataset.count()}};
  const auto* torch = dynamic_cast<const TorchBackendConfig*>(options.backend_config.get());
  auto params = to_json(detail::train::Params{.train_loop_config = options.train_loop_config,
                                              .metadata = options.metadata,
                                              .scaling = options.scaling_config,
                                              .checkpoint = options.run_config.checkpoint_config,
                                              .max_failures = options.run_config.failure_config.max_failures,
                                              .torch = torch != nullptr ? torch->config() : TorchConfig{},
                                              .data = options.dataset_config});
  params.update({
      {"muster_version", MUSTER_VERSION},
      {"program", launch.program()},
      {"name", run.name()},
      {"hosts", launch.communicator().topology().hosts},
      {"num_ranks", launch.size()},
      {"world_size", workers},
      {"seed", launch.flags().seed},
      {"threads_per_worker", threads_of(launch, options.scaling_config)},
      {"datasets", datasets},
  });
  return params;
}

/// The path from the root on, without a slash at its end, which would hide its last name.
std::filesystem::path whole_path(const std::filesystem::path& path) {
  const auto whole = std::filesystem::absolute(path).lexically_normal();
  return whole.has_filename() ? whole : whole.parent_path();
}

/// Whether the run that left `previous` behind is finished and was asked for the same.
bool already_finished(const Json& previous, const Json& params) {
  return previous.is_object() && previous.value("finished", false) &&
         previous.value("train_loop_config", Json()) == params.at("train_loop_config");
}

/// The checkpoint that --resume PATH names: PATH itself, or the newest whole one of the run at PATH.
Checkpoint checkpoint_at(const std::filesystem::path& path, const Communicator& communicator) {
  return Checkpoint::from_directory(detail::comm::on_root(communicator, [&] {
    if (std::filesystem::exists(detail::status_of(path / "manifest.json"))) return path.string();
    const auto newest = detail::checkpoint::newest_whole(path);
    if (!newest)
      throw Error(ExitCode::data, "resuming from " + path.string(), "there is no whole checkpoint",
                  "Name a checkpoint or a run's folder; `muster checkpoint ls` shows what a run has");
    return newest->string();
  }));
}

/// Whether `path` lies right in the run's folder, by whatever name it is reached.
bool is_in(const std::filesystem::path& path, const Run& run) {
  std::error_code ignored;  // of a path that is not there
  return path.parent_path() == run.path() || std::filesystem::equivalent(path.parent_path(), run.path(), ignored);
}

/// What the run goes on from: its own newest checkpoint, else --resume PATH, else resume_from_checkpoint.
std::optional<Checkpoint> choose_start(SessionState& session, const std::optional<Checkpoint>& given) {
  const auto& flags = session.launch.flags();
  const bool named = flags.resume == Resume::path;
  const auto path = named ? whole_path(flags.resume_path) : std::filesystem::path();
  // A checkpoint of this very run is a step back; any other only seeds a run that has none of its own.
  if (named) {
    const auto own = detail::comm::on_root(session.control, [&] {
      if (!is_in(path, session.run)) return std::string();
      const auto index = detail::checkpoint::Tier::index_of(path.filename());
      if (!index)
        throw Error(ExitCode::data, "resuming from " + path.string(), "it is in this run and is no checkpoint of it",
                    "Name a checkpoint; `muster checkpoint ls` shows those that are there");
      return std::to_string(*index);
    });
    if (!own.empty()) session.store.roll_back(std::stoi(own));
  }
  if (auto newest = session.store.newest()) return newest;
  if (named) return checkpoint_at(path, session.control);
  if (flags.resume == Resume::must && !given)
    throw Error(ExitCode::data, "resuming the run " + session.run.path().string(), "it has no checkpoint",
                "Use --resume auto to start afresh");
  const auto all = session.control.all_reduce(std::int64_t{given.has_value()});
  if (all != 0 && all != session.control.size())
    throw Error(ExitCode::usage, "starting the run " + session.run.path().string(),
                "some ranks give resume_from_checkpoint and others do not", "Give it on every rank");
  return given;
}

/// Takes up the run's counters, history and preprocessor where `start` left them.
void take_up(SessionState& session) {
  if (!session.start) return session.sinks.start(session.control, {});
  const auto& saved = session.read_start();
  const auto& progress = saved.trainer;
  session.training_iteration = progress.training_iteration;
  session.time_before = progress.time_total_s;
  auto row = saved.metrics;
  session.score_reported = row.contains(session.config.checkpoint_config.checkpoint_score_attribute);
  // What another run has reported is not this run's history.
  if (const auto& start = session.start->path(); start.parent_path() == session.run.path()) {
    row["checkpoint_dir_name"] = start.filename().string();
    session.sinks.start(session.control, {progress.training_iteration, row});
  } else {
    session.sinks.start(session.control, {});
  }
  if (!session.root()) return;
  if (!progress.of_a_run) return detail::log::info("starting from " + session.start->path().string());
  detail::log::info("resuming from " + session.start->path().string() + " (report " +
                    std::to_string(session.training_iteration) + ", epoch " + std::to_string(progress.epoch + 1) +
                    (progress.epoch_complete ? " done)" : " in progress)"));
}

/// Fits the preprocessor unless it is, or loads what a checkpoint has of it, and lays it over all datasets.
void preprocess(SessionState& session) {
  if (!session.preprocessor) return;
  const Json saved = session.start ? session.read_start().trainer.preprocessor : Json();
  if (!saved.is_null()) {
    try {
      session.preprocessor->load_state(saved);
    } catch (const Json::exception& error) {
      throw Error(ExitCode::data, "restoring the preprocessor", error.what(),
                  "Build the same preprocessor as the run that was saved");
    }
  } else if (session.control.all_reduce(std::int64_t{!session.preprocessor->fitted()}) == 0) {
    // As its owner has fitted it, or an attempt before this one.
  } else if (const auto train = session.datasets.find("train"); train != session.datasets.end()) {
    session.preprocessor->fit(train->second, session.control);
  } else {
    throw Error(ExitCode::user_error, "fitting the preprocessor", "there is no dataset \"train\"",
                "Give the trainer one, or a preprocessor that is fitted already");
  }
  for (auto& [name, dataset] : session.datasets) dataset = dataset.transform(session.preprocessor);
}

/// One attempt on one worker.
void train_once(SessionState& session, const DataParallelTrainerOptions& options, const TrainLoop& train_loop) {
  const c10::DeviceGuard own(session.device);  // for the user's at::kCUDA without a number
  at::set_num_threads(threads_of(session.launch, session.scaling));
  detail::train::seed_generators(session.launch.flags().seed, session.workers.rank());
  if (session.share.fixed)
    session.generators.emplace(session.launch.flags().seed, session.share.first, session.share.count, session.device);
  session.start = choose_start(session, options.resume_from_checkpoint);
  session.newest = session.start;
  session.watch_passes();
  take_up(session);
  preprocess(session);

  Session view(session);
  const std::shared_ptr<Backend> backend =
      options.backend_config ? options.backend_config->make_backend() : std::make_unique<Backend>();
  backend->on_start(view);
  session.backend = backend;
  backend->on_training_start(view);
  session.begin = session.last_report = SessionState::Clock::now();
  train_loop(view, options.train_loop_config);
  session.end_training();
  std::exchange(session.backend, nullptr)->on_shutdown(view);
  session.sinks.finish({});
}

/// The end of an attempt that has thrown on this worker, after the others have been told.
void shut_down(SessionState& session, const detail::comm::Outcome& cause) noexcept {
  session.failed = true;
  Session view(session);
  if (const auto backend = std::exchange(session.backend, nullptr)) try {
      backend->on_shutdown(view);
    } catch (...) {
      detail::log::warn("shutting down the backend after a failure: " + detail::comm::caught().text);
    }
  session.sinks.finish(Error(cause.code, cause.text));
}

/// Says that training is done, which it is whether that can be written or not.
void finish(const Run& run, Json params) {
  run.remove_error();
  params["finished"] = true;
  try {
    run.write_params(params);
  } catch (const Error& error) {
    detail::log::warn(std::string("training is done, but started again it goes on from the newest checkpoint: ") +
                      error.what());
  }
}

/// Best first by the score, else newest first.
std::vector<CheckpointInfo> ranked_checkpoints(const std::filesystem::path& run, const CheckpointConfig& config) {
  auto all = list_checkpoints(run);
  std::erase_if(all, [](const CheckpointInfo& info) { return !info.problem.empty(); });
  std::reverse(all.begin(), all.end());
  if (config.checkpoint_score_attribute.empty()) return all;
  const auto score = [&](const CheckpointInfo& info) {
    const auto value =
        info.metrics.is_object() ? info.metrics.value(config.checkpoint_score_attribute, Json()) : Json();
    if (!value.is_number()) return -std::numeric_limits<double>::infinity();
    return config.checkpoint_score_order == ScoreOrder::max ? value.get<double>() : -value.get<double>();
  };
  std::stable_sort(all.begin(), all.end(), [&](const auto& a, const auto& b) { return score(a) > score(b); });
  return all;
}

/// What the run in that folder was asked for; an Error (ExitCode::data) if it cannot be restored.
detail::train::Params saved_params(const std::filesystem::path& run) {
  const std::string doing = "restoring the run " + run.string();
  if (!std::filesystem::exists(detail::status_of(run / "params.json")))
    throw Error(ExitCode::data, doing, "it has no params.json", "Name the folder of a run");
  auto params = detail::train::read_params(run);
  if (!detail::checkpoint::newest_whole(run))
    throw Error(ExitCode::data, doing, "it has no whole checkpoint", "Start it again under its name, or another run");
  return params;
}

/// What the run's directory holds now, the same on every rank.
Result read_result(const Communicator& world, const Run& run, const CheckpointConfig& config) {
  const auto content = Json::parse(detail::comm::on_root(world, [&] {
    const auto steps = detail::checkpoint::read_rollbacks(run.path());
    Json checkpoints = Json::array();
    std::string newest;
    int newest_index = -1;
    for (const auto& info : ranked_checkpoints(run.path(), config)) {
      if (detail::checkpoint::rolled_back(steps, info.index)) continue;
      checkpoints.push_back({info.path.string(), info.metrics});
      if (info.index > newest_index) newest = info.path.string();
      newest_index = std::max(newest_index, info.index);
    }
    return Json{detail::observe::History::read(run.path()), checkpoints, newest}.dump();
  }));
  Result result;
  result.path = run.path();
  result.metrics_history = content[0].get<std::vector<Json>>();
  if (!result.metrics_history.empty()) result.metrics = result.metrics_history.back();
  for (const auto& entry : content[1])
    result.best_checkpoints.emplace_back(Checkpoint::from_directory(entry[0].get<std::string>()), entry[1]);
  if (const auto newest = content[2].get<std::string>(); !newest.empty())
    result.checkpoint = Checkpoint::from_directory(newest);
  return result;
}

}  // namespace

DataParallelTrainer::DataParallelTrainer(Launch& launch, TrainLoop train_loop, DataParallelTrainerOptions options)
    : launch_(launch), train_loop_(std::move(train_loop)), options_(std::move(options)) {}

bool DataParallelTrainer::can_restore(const std::filesystem::path& path) {
  try {
    saved_params(whole_path(path));
    return true;
  } catch (const Error& error) {
    if (error.code() != ExitCode::data) throw;
    return false;
  }
}

Result DataParallelTrainer::fit() {
  const auto& world = launch_.communicator();
  const auto& flags = launch_.flags();
  detail::train::check_together(world, {.done = detail::comm::time_limit(world), .failed = last_grace},
                                [&] { setup(); });
  const int workers = count_workers(launch_, options_.scaling_config);
  static_cast<void>(choose_share(options_.scaling_config, workers, 0));
  options_.train_loop_config = Json::parse(detail::comm::on_root(
      world, [&] { return detail::launch::resolve(options_.train_loop_config, flags.config_file, flags.set).dump(); }));
  const Run run(world, launch_, options_.run_config);
  try {
    return train(run, workers);
  } catch (const detail::comm::Lost& lost) {
    run.write_error(world, lost);
    throw;
  }
}

Result DataParallelTrainer::train(const Run& run, int workers) {
  const auto& world = launch_.communicator();
  const auto& flags = launch_.flags();
  const auto limit = choose_limit(launch_, options_.backend_config.get());
  const detail::comm::TimeLimit everywhere(world, limit);
  detail::comm::on_root(world, [&] {
    for (const char* name : {"params.json", "result.json", "progress.csv", "error.txt", "steps_back.json", ".token",
                             ".owner", "logs/.owner"})
      detail::remove_unfinished(run.path() / name);
    if (flags.resume == Resume::never && !list_checkpoints(run.path()).empty())
      throw Error(ExitCode::usage, "starting the run " + run.path().string(),
                  "--resume never is set and it has checkpoints", "Choose another --name, or remove that folder");
    return std::string();
  });
  // Everything that can be found wrong before training is, on the rank that sees it. A rank that only waits needs
  // neither a GPU nor the data.
  const bool works = world.rank() < workers;
  at::Device device = at::kCPU;
  std::map<std::string, detail::data::Fingerprint> prints;
  detail::train::check_together(world, {.done = limit, .failed = last_grace}, [&] {
    if (!works) return;
    device = choose_device(options_.scaling_config, world);
    for (const auto& [name, dataset] : options_.datasets) prints[name] = dataset.source()->fingerprint();
  });
  detail::train::require_same_data(world, workers, prints);
  for (const auto& name : options_.dataset_config.datasets_to_split)
    if (name != "train" && !options_.datasets.contains(name))  // the default names "train" whether there is one or not
      detail::log::warn("datasets_to_split names \"" + name + "\", and the trainer was given no such dataset");

  Json params = describe(launch_, options_, run, workers);
  if (flags.resume == Resume::automatic && already_finished(run.previous_params(), params)) {
    detail::log::info("the run " + run.path().string() + " is finished; choose another --name to train again");
    detail::comm::on_root(world,
                          [&] { return detail::checkpoint::Tier(run.path()).remove_unfinished(), std::string(); });
    return read_result(world, run, options_.run_config.checkpoint_config);
  }
  detail::comm::on_root(world, [&] { return run.write_params(params), std::string(); });
  const auto counted = [](int count, const char* what) {
    return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
  };
  if (world.rank() == 0)
    detail::log::info("run " + run.path().string() + ": " + counted(workers, "worker") + " on " +
                      counted(nodes_of(world.topology(), workers), "node") + ", " +
                      counted(threads_of(launch_, options_.scaling_config), "thread") + " each");

  const int max_failures = options_.run_config.failure_config.max_failures;
  std::optional<Error> error;
  for (int failures = 0;; ++failures) {
    const bool last = max_failures >= 0 && failures >= max_failures;
    // A failed attempt leaves collectives half done, so each one has channels of its own.
    const auto part = world.split(works ? 0 : 1);
    const auto control = part.duplicate();
    const detail::train::Patience patience{.done = works ? limit : std::chrono::milliseconds(spare_patience),
                                           .failed = last ? std::chrono::milliseconds(last_grace) : limit};
    bool stopped = false;
    error = detail::train::attempt(world, patience, [&] {
      if (!works) return;
      SessionState session{
          .launch = launch_,
          .run = run,
          .workers = part,
          .control = control,
          .scaling = options_.scaling_config,
          .config = options_.run_config,
          .metadata = options_.metadata,
          .device = device,
          .preprocessor = options_.preprocessor,
          .datasets = options_.datasets,
          .data_config = options_.dataset_config,
          .share = choose_share(options_.scaling_config, workers, part.rank()),
          .store = detail::checkpoint::Store(control, run.path(), options_.run_config.checkpoint_config),
          .sinks = {part.rank() == 0, run.path(), flags.progress, options_.run_config.callbacks}};
      try {
        train_once(session, options_, train_loop_);
      } catch (...) {
        // Before the session goes, and with it connections on which the others may be waiting.
        const auto cause = detail::comm::caught(world);
        detail::comm::raise_alarm(world, cause);
        shut_down(session, cause);
        stopped = session.stopped;
        throw;
      }
    });
    if (!error) break;
    if (error->code() != ExitCode::stopped && world.rank() == 0) run.write_error(error->what());
    if (last || error->code() == ExitCode::usage || error->code() == ExitCode::stopped) break;
    // Nothing may have been saved, but nobody wants another attempt. Ranks that only wait do not know.
    if (error->code() == ExitCode::retry && world.all_reduce(std::int64_t{stopped}, ReduceOp::max) != 0) break;
    if (world.rank() == 0)
      detail::log::warn(std::string(error->what()) + " — trying again from the newest checkpoint (failure " +
                        std::to_string(failures + 1) + (max_failures > 0 ? " of " + std::to_string(max_failures) : "") +
                        ")");
  }
  if (!error && world.rank() == 0) finish(run, std::move(params));
  Result result;
  try {
    result = read_result(world, run, options_.run_config.checkpoint_config);
  } catch (const Error& unreadable) {
    if (!error) throw;
    detail::log::warn(unreadable.what());  // and not in the place of the cause
    result.path = run.path();
  }
  result.error = error;
  return result;
}

TorchTrainer::TorchTrainer(Launch& launch, TrainLoop train_loop, TorchTrainerOptions options, int)
    : DataParallelTrainer(launch, std::move(train_loop),
                          {.train_loop_config = std::move(options.train_loop_config),
                           .backend_config = std::make_shared<TorchBackendConfig>(std::move(options.torch_config)),
                           .scaling_config = options.scaling_config,
                           .dataset_config = std::move(options.dataset_config),
                           .run_config = std::move(options.run_config),
                           .datasets = std::move(options.datasets),
                           .preprocessor = std::move(options.preprocessor),
                           .metadata = std::move(options.metadata),
                           .resume_from_checkpoint = std::move(options.resume_from_checkpoint)}) {}

TorchTrainerOptions TorchTrainer::restored(const std::filesystem::path& path, TorchTrainerOptions options) {
  const auto run = whole_path(path);
  const auto saved = saved_params(run);
  if (options.train_loop_config.empty()) options.train_loop_config = saved.train_loop_config;
  if (options.metadata.empty()) options.metadata = saved.metadata;
  auto& scaling = options.scaling_config;
  if (!scaling.num_workers) scaling.num_workers = saved.scaling.num_workers;
  scaling.use_gpu = scaling.use_gpu || saved.scaling.use_gpu;
  if (!scaling.threads_per_worker) scaling.threads_per_worker = saved.scaling.threads_per_worker;
  if (!scaling.virtual_workers) scaling.virtual_workers = saved.scaling.virtual_workers;
  if (auto& failures = options.run_config.failure_config.max_failures; failures == 0) failures = saved.max_failures;
  if (options.torch_config.backend == TorchConfig{}.backend) options.torch_config.backend = saved.torch.backend;
  if (!options.torch_config.timeout) options.torch_config.timeout = saved.torch.timeout;
  auto& data = options.dataset_config;
  if (!data.split_all && data.datasets_to_split == DataConfig{}.datasets_to_split) data = saved.data;
  auto& kept = options.run_config.checkpoint_config;
  if (!kept.num_to_keep) kept.num_to_keep = saved.checkpoint.num_to_keep;
  if (kept.checkpoint_score_attribute.empty()) {
    kept.checkpoint_score_attribute = saved.checkpoint.checkpoint_score_attribute;
    kept.checkpoint_score_order = saved.checkpoint.checkpoint_score_order;
  }
  options.run_config.name = run.filename();
  options.run_config.storage_path = run.parent_path();
  return options;
}

}  // namespace muster
