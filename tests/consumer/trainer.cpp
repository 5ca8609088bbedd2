// A backend and a trainer of a user's own, who takes short names for himself.
//
//   mpirun -n 2 ./trainer --storage DIR
#include <muster/muster.hpp>

#include <ATen/ops/full.h>
#include <torch/nn/modules/linear.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <stdexcept>

using namespace muster;

std::string said;

/// What the framework wants to find in the environment of every rank.
struct OwnConfig : BackendConfig {
  explicit OwnConfig(std::string variable_) : variable(std::move(variable_)) {}
  std::unique_ptr<Backend> make_backend() const override;
  std::optional<std::chrono::milliseconds> timeout() const override { return std::chrono::minutes(1); }
  std::string variable;
};

/// Tells the ranks how many they are, as some libraries want to be told, and lets tensors travel in small pieces.
struct OwnBackend : Backend {
  explicit OwnBackend(const OwnConfig& config) : variable(config.variable) {}
  void on_start(Session& session) override {
    said += " start";
    ::setenv(variable.c_str(), std::to_string(session.world_size()).c_str(), 1);
    const ProcessGroupOptions options{.backend = session.flags().backend.value_or("mpi"), .chunk = 16};
    session.set_process_group(
        [workers = session.communicator(), options] { return make_process_group(workers, options); });
  }
  void on_training_start(Session& session) override {
    if (session.metadata().at("fault") == "refuses" && session.world_rank() == 1)
      throw std::runtime_error("it does not like this machine");
    said += " training_start:" + std::to_string(session.process_group()->getSize());
  }
  void on_shutdown(Session& session) override {
    said += session.failed() ? " failed" : " shutdown";
    ::unsetenv(variable.c_str());
  }
  std::string variable;
};

std::unique_ptr<Backend> OwnConfig::make_backend() const { return std::make_unique<OwnBackend>(*this); }

double data(const DatasetShard& shard) {
  double sum = 0;
  for (const auto& batch : shard.iter_torch_batches({.batch_size = 1, .training = false}))
    sum += batch["x"].item<double>() * static_cast<double>(batch.size());
  return sum;
}

torch::nn::Linear model() { return torch::nn::Linear(1, 1); }

double comm(const Session& session, double value) { return session.mean(at::full({40}, value)).sum().item<double>(); }

Checkpoint checkpoint(double value) { return Checkpoint::from_dict({{"value", value}}); }

double train(Session& session, const Config& config) {
  const char* told = std::getenv("OWN_WORLD_SIZE");
  said += std::string(" told:") + (told != nullptr ? told : "nothing");
  session.barrier();
  if (session.metadata().at("fault") == "fails" && session.world_rank() == 1) throw std::runtime_error("as told");
  if (config.at("again")) said += " from:" + session.get_checkpoint()->path().filename().string();
  const auto net = session.prepare_model(model());
  auto mean = comm(session, data(session.get_dataset_shard("own")));
  said += " mean:" + std::to_string(static_cast<int>(mean));
  session.report({{"mean", mean}}, checkpoint(mean));
  return mean;
}

/// Has its function and its backend, splits every dataset, and trains on as many samples as it is told to.
struct OwnTrainer : DataParallelTrainer {
  explicit OwnTrainer(Launch& launch, TrainerOptions options = {})
      : DataParallelTrainer(launch, train, std::move(options)) {}
  void setup() override {
    options_.backend_config = std::make_shared<OwnConfig>("OWN_WORLD_SIZE");
    const auto count = options_.metadata.at("count").get<std::int64_t>();
    options_.datasets.insert_or_assign("own", Dataset::from_tensors({{"x", at::full({count, 1}, 2.0)}}));
  }
  DataConfig default_dataset_config() const override { return {.split_all = true}; }
  static OwnTrainer restore(Launch& launch, const std::filesystem::path& path, TrainerOptions options = {}) {
    return OwnTrainer(launch, restored_options(path, std::move(options)));
  }
};

int main(int argc, char** argv) {
  Launch launch(argc, argv);
  return launch.run([&] {
    std::filesystem::path run;
    for (const std::string fault : {"none", "fails", "refuses"}) {
      const auto result = OwnTrainer(launch, {.train_loop_config = {{"again", false}},
                                              .run_config = {.name = fault},
                                              .metadata = {{"fault", fault}, {"count", 6}}})
                              .fit();
      said += result.error ? " error\n" : " result:" + result.return_value.dump() + "\n";
      if (fault == "none") run = result.path;
    }
    const auto again = OwnTrainer::restore(launch, run, {.train_loop_config = {{"again", true}}}).fit();
    said += " result:" + again.return_value.dump() + "\n";
    const auto all = launch.communicator().all_gather(said);
    if (launch.rank() == 0)
      for (const auto& one : all) std::cout << one;
  });
}
