// A backend and a trainer of a user's own, who takes short names for himself.
//
//   mpirun -n 2 ./trainer --storage DIR
#include <muster/muster.hpp>

#include <ATen/ops/full.h>
#include <torch/nn/modules/linear.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdlib>
#include <iostream>
#include <stdexcept>

using namespace muster;

std::string said;

/// Tells the ranks how many they are, as some libraries want to be told, and lets tensors travel in small pieces.
struct OwnBackend : Backend {
  void on_start(Session& session) override {
    said += " start";
    ::setenv("OWN_WORLD_SIZE", std::to_string(session.world_size()).c_str(), 1);
    const ProcessGroupOptions options{.backend = session.flags().backend.value_or("mpi"), .chunk = 16};
    session.set_process_group(
        [workers = session.communicator(), options] { return make_process_group(workers, options); });
  }
  void on_training_start(Session& session) override {
    said += " training_start:" + std::to_string(session.process_group()->getSize());
  }
  void on_shutdown(Session& session) override {
    said += session.failed() ? " failed" : " shutdown";
    ::unsetenv("OWN_WORLD_SIZE");
  }
};

struct OwnConfig : BackendConfig {
  std::unique_ptr<Backend> make_backend() const override { return std::make_unique<OwnBackend>(); }
  std::optional<std::chrono::milliseconds> timeout() const override { return std::chrono::minutes(1); }
};

/// Trains on as many samples as it is told to.
struct OwnTrainer : DataParallelTrainer {
  using DataParallelTrainer::DataParallelTrainer;
  void setup() override {
    options_.backend_config = std::make_shared<OwnConfig>();
    const auto count = options_.metadata.at("count").get<std::int64_t>();
    options_.datasets.insert_or_assign("train", Dataset::from_tensors({{"x", at::full({count, 1}, 2.0)}}));
  }
};

double data(const DatasetShard& shard) {
  double sum = 0;
  for (const auto& batch : shard.iter_torch_batches({.batch_size = 1, .training = false}))
    sum += batch["x"].item<double>() * static_cast<double>(batch.size());
  return sum;
}

torch::nn::Linear model() { return torch::nn::Linear(1, 1); }

double comm(const Session& session, double value) { return session.mean(at::full({40}, value)).sum().item<double>(); }

Checkpoint checkpoint(double value) { return Checkpoint::from_dict({{"value", value}}); }

void train(Session& session) {
  const char* told = std::getenv("OWN_WORLD_SIZE");
  said += std::string(" told:") + (told != nullptr ? told : "nothing");
  session.barrier();
  if (session.metadata().at("fails").get<bool>() && session.world_rank() == 1) throw std::runtime_error("as told");
  const auto net = session.prepare_model(model());
  auto mean = comm(session, data(session.get_dataset_shard()));
  said += " mean:" + std::to_string(static_cast<int>(mean));
  session.report({{"mean", mean}}, checkpoint(mean));
}

int main(int argc, char** argv) {
  Launch launch(argc, argv);
  return launch.run([&] {
    for (const bool fails : {false, true}) {
      const auto result =
          OwnTrainer(launch, train,
                     {.run_config = {.name = fails ? "fails" : "trains"}, .metadata = {{"fails", fails}, {"count", 6}}})
              .fit();
      said += result.error ? " error\n" : " result\n";
    }
    const auto all = launch.communicator().all_gather(said);
    if (launch.rank() == 0)
      for (const auto& one : all) std::cout << one;
  });
}
