#include "run/resolve.hpp"

#include "base/duration.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "comm/on_ranks.hpp"
#include "comm/timeout.hpp"
#include "launch/settings.hpp"
#include "launch/supervised.hpp"
#include "observe/observers.hpp"

#include <algorithm>
#include <tuple>

namespace muster::detail::run {
namespace {

/// Returns the number of workers. `full_worker_count`: before the call, the number of ranks of a launch in which none
/// is missing, or 0 if no ranks may be missing; after the call, the number of workers that such a launch would have, or
/// 0.
int count_workers(const Launch& launch, const ScalingConfig& scaling, int& full_worker_count) {
  const auto& asked = scaling.num_workers;
  const bool range = asked.is_range() && !launch.flags().workers;
  if (range && (*asked.least() < 1 || *asked.least() > *asked.most()))
    throw Error(ExitCode::usage, "choosing the workers",
                str("{", *asked.least(), ", ", *asked.most(), "} is not a range of workers"),
                "Ask for {least, most}, from 1 on");
  const int there = std::max(launch.size(), full_worker_count);
  int workers = launch.flags().workers.value_or(asked.most().value_or(there));
  if (range) workers = full_worker_count = std::min(workers, there);
  if (full_worker_count > 0 && workers <= full_worker_count) {
    full_worker_count = workers;
    workers = std::min(workers, launch.size());
  }
  if (range && workers < *asked.least())
    throw Error(ExitCode::usage, "choosing the workers",
                str("at least ", *asked.least(), " were asked for and the launch has ", counted(launch.size(), "rank")),
                str("Start it with mpirun -n ", *asked.least(), " or more, or ask for fewer"));
  if (workers < 1)
    throw Error(ExitCode::usage, "choosing the workers", str(workers, " is not a number of workers"),
                "Ask for 1 or more");
  if (workers > launch.size())
    throw Error(ExitCode::usage, "choosing the workers",
                str(workers, " workers were asked for and the launch has ", counted(launch.size(), "rank")),
                str("Start it with mpirun -n ", workers, ", or ask for fewer with --workers"));
  return workers;
}

std::chrono::milliseconds choose_timeout(const Launch& launch, const BackendConfig* backend) {
  const auto own = backend == nullptr ? std::nullopt : backend->timeout();
  if (own && own->count() <= 0)
    throw Error(ExitCode::usage, "choosing how long ranks wait for each other",
                str(own->count(), " ms is not a time limit"), "Give TorchConfig::timeout more than 0, or leave it out");
  return usable_timeout(launch.flags().timeout.value_or(own.value_or(comm::timeout(launch.communicator()))));
}

/// Throws an Error if the text is not UTF-8, since params.json could not hold it.
void require_utf8(const std::string& text, const char* option) {
  if (!is_utf8(text))
    throw Error(ExitCode::usage, str("reading CheckpointConfig::", option), "it is not UTF-8", "Choose another one");
}

/// Returns the options that must be equal on all ranks. Not among them are the name, the storage path, the settings and
/// the metadata, since all ranks use rank 0's; and logging, threads and the fast tier, which may differ between hosts.
Json comparable(const TrainerOptions& options) {
  Json same = options.scaling_config;
  const Json run = options.run_config;
  for (const auto& part : {Json(options.dataset_config), run, run.at("checkpoint_config"), run.at("failure_config")})
    same.update(part);
  for (const auto* const own : {"threads_per_worker", "fast_tier", "name", "storage_path", "logging_config",
                                "callbacks", "checkpoint_config", "failure_config"})
    same.erase(own);
  same["torch_config"] = options.torch_config;
  same["preprocessor"] = options.preprocessor ? "given" : "none";
  same["validation"] = options.validation.function ? "given" : "none";
  return same;
}

}  // namespace

step::MicroBatchShare ResolvedOptions::share_of(int worker) const {
  const auto& virtual_workers = options.scaling_config.virtual_workers;
  if (!virtual_workers) return {.total = worker_count, .first = worker, .count = 1};
  if (*virtual_workers < 1 || *virtual_workers % worker_count != 0)
    throw Error(ExitCode::usage, "choosing the workers",
                str(*virtual_workers, " virtual workers cannot be divided evenly among ", worker_count),
                "Start as many workers as divide them; 12 goes with 1, 2, 3, 4, 6 and 12");
  const int count = *virtual_workers / worker_count;
  return {.total = *virtual_workers, .first = worker * count, .count = count, .fixed = true};
}

ResolvedOptions resolve(const Launch& launch, const TrainerOptions& options,
                        std::shared_ptr<const BackendConfig> backend) {
  comm::require_same_options(launch.communicator(), "the trainer", comparable(options));
  const auto& flags = launch.flags();
  const auto& scaling = options.scaling_config;
  const auto& checkpoint_config = options.run_config.checkpoint_config;
  require_utf8(checkpoint_config.fast_tier.string(), "fast_tier");
  require_utf8(checkpoint_config.checkpoint_score_attribute, "checkpoint_score_attribute");
  const auto supervisor = launch::supervisor();
  int full_worker_count = supervisor ? supervisor->full_worker_count : 0;
  const int workers = count_workers(launch, scaling, full_worker_count);
  if (scaling.num_workers.is_range() && !flags.workers && launch.rank() == 0)
    launch::tell_supervisor(launch::message_min_workers, std::to_string(*scaling.num_workers.least()));
  ResolvedOptions resolved{
      .launch = launch,
      .flags = flags,
      .cpus_per_rank = launch.cpus_per_rank(),
      .options = options,
      .backend = std::move(backend),
      .worker_count = workers,
      .full_worker_count = full_worker_count,
      .threads_per_worker = flags.threads.value_or(scaling.threads_per_worker.value_or(launch.threads_per_rank())),
      .progress = flags.progress};
  static_cast<void>(resolved.share_of(0));
  resolved.options.train_loop_config = json_from_text(comm::run_on_root(resolved.world(), [&] {
    return json_text(launch::resolve(options.train_loop_config, flags.config_files, flags.set));
  }));
  auto& callbacks = resolved.options.run_config.callbacks;
  callbacks.insert(callbacks.end(), launch.callbacks().begin(), launch.callbacks().end());
  auto& run_config = resolved.options.run_config;
  run_config.tensorboard = run_config.tensorboard || flags.tensorboard;
  observe::require_libraries(run_config);
  auto& profile = run_config.profile;
  if (flags.profile) {
    profile.enabled = true;
    std::tie(profile.first_step, profile.last_step) = *flags.profile;
  }
  if (flags.profile_operators) profile.enabled = profile.operators = true;
  if (const bool is_default = profile.first_step == 0 && profile.last_step == 0;
      !is_default && (profile.first_step < 1 || profile.last_step < profile.first_step))
    throw Error(ExitCode::usage, "choosing the steps of the profile",
                str(profile.first_step, " to ", profile.last_step, " is no range of steps"),
                "Give the first and the last step, from 1 on, or neither");
  if (run_config.histogram_interval < 0)
    throw Error(ExitCode::usage, "choosing the reports with histograms",
                str("histogram_interval is ", run_config.histogram_interval), "Give 1 or more, or 0 for none");
  resolved.timeout = choose_timeout(launch, resolved.backend.get());
  auto& longest_validation = resolved.options.validation.timeout;
  longest_validation = usable_timeout(longest_validation);
  if (const auto& validation = options.validation; validation.function && validation.timeout.count() <= 0)
    throw Error(ExitCode::usage, "choosing how long a validation may take",
                str(validation.timeout.count(), " ms is not a time limit"),
                "Give ValidationConfig::timeout more than 0");
  return resolved;
}

}  // namespace muster::detail::run
