// Reads and writes the options of a run and of its ranks as JSON.
#include "base/option_json.hpp"
#include "muster/trainer.hpp"

namespace muster {
namespace detail::option_json {

template <>
constexpr bool is_data<std::map<std::string, Dataset>> = false;
template <>
constexpr bool is_data<std::optional<Checkpoint>> = false;
template <>
struct EnumNames<BadNumbers> {
  static constexpr std::array names{"ignore", "stop", "skip", "roll_back"};
};

}  // namespace detail::option_json

static void to_json(Json& json, const NumWorkers& workers) {
  if (workers.is_range())
    json = {*workers.least(), *workers.most()};
  else
    json = workers.most() ? Json(*workers.most()) : Json();
}

static void from_json(const Json& json, NumWorkers& workers) {
  using detail::option_json::from;
  int least = 0, most = 0;
  if (json.is_null()) {
    workers = {};
  } else if (json.is_array()) {
    detail::require_valid(json.size() == 2, "is not a number, or the least and the most");
    from(json[0], least);
    from(json[1], most);
    workers = {least, most};
  } else {
    from(json, most);
    workers = most;
  }
}

MUSTER_OPTIONS(ScalingConfig, num_workers, use_gpu, threads_per_worker, virtual_workers)
MUSTER_OPTIONS(FailureConfig, max_failures, max_preemption_failures, bad_numbers, bad_numbers_limit)
MUSTER_OPTIONS(LoggingConfig, level, file, per_rank)
MUSTER_OPTIONS(ProfileConfig, enabled, first_step, last_step, operators)
MUSTER_OPTIONS(RunConfig, name, storage_path, checkpoint_config, failure_config, logging_config, callbacks, tensorboard,
               histogram_interval, profile)
MUSTER_OPTIONS(TorchConfig, backend, timeout)
MUSTER_OPTIONS(TrainerOptions, train_loop_config, backend_config, torch_config, scaling_config, dataset_config,
               run_config, datasets, preprocessor, metadata, resume_from_checkpoint, validation)

}  // namespace muster
