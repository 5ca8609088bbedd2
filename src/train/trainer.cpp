#include "muster/trainer.hpp"

#include "comm/agreement.hpp"
#include "comm/world.hpp"
#include "train/attempts.hpp"
#include "train/check.hpp"
#include "train/on_all_ranks.hpp"
#include "train/params.hpp"
#include "train/resolve.hpp"
#include "train/result.hpp"
#include "train/run_folder.hpp"
#include "train/start.hpp"

#include <utility>

namespace muster {

namespace {

class TorchBackendConfig final : public BackendConfig {
 public:
  explicit TorchBackendConfig(TorchConfig config) : config_(std::move(config)) {}
  std::unique_ptr<Backend> make_backend() const override { return std::make_unique<TorchBackend>(config_); }
  std::optional<std::chrono::milliseconds> timeout() const override { return config_.timeout; }

 private:
  TorchConfig config_;
};

}  // namespace

DataParallelTrainer::DataParallelTrainer(Launch& launch, TrainLoop train_loop, TrainerOptions options)
    : launch_(launch), train_loop_(std::move(train_loop)), options_(std::move(options)) {}

bool DataParallelTrainer::can_restore(const std::filesystem::path& path) {
  try {
    detail::train::saved_options(detail::train::whole_path(path));
    return true;
  } catch (const Error& error) {
    if (error.code() != ExitCode::data) throw;
    return false;
  }
}

Result DataParallelTrainer::fit() {
  using namespace detail::train;
  const auto& world = launch_.communicator();
  check_on_all_ranks(world, {.done = detail::comm::time_limit(world), .failed = final_grace}, [&] { setup(); });
  const Plan plan = resolve(launch_, options_, backend_config());
  RunFolder run(world, launch_, plan.options.run_config);
  try {
    const detail::comm::TimeLimit everywhere(world, plan.wait_limit);
    const auto device = check_together(plan);
    if (!start(plan, run)) return read_result(plan, run);
    return finish(plan, run, train_with_retries(plan, run, device, train_loop_));
  } catch (const detail::comm::Lost& lost) {
    run.write_error(world, lost);
    throw;
  }
}

std::shared_ptr<const BackendConfig> TorchTrainer::backend_config() const {
  if (options_.backend_config) return options_.backend_config;
  return std::make_shared<TorchBackendConfig>(options_.torch_config);
}

TorchTrainer TorchTrainer::restore(Launch& launch, const std::filesystem::path& path, TrainLoop train_loop,
                                   TrainerOptions options) {
  const auto run = detail::train::whole_path(path);
  return {launch, std::move(train_loop), detail::train::restored_options(run, std::move(options))};
}

}  // namespace muster
