#include "training.hpp"

#include "base/temporary.hpp"
#include "programs.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <muster/error.hpp>
#include <muster/trainer.hpp>

#include <cstdlib>
#include <filesystem>
#include <optional>

namespace muster::bench {

std::vector<Batch> random_batches(int rank, std::int64_t batch_size) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 + rank));
  std::vector<Batch> batches(4);
  for (auto& batch : batches)
    batch = {torch::randn({batch_size, 1, 28, 28}), torch::randint(10, {batch_size}, torch::kLong)};
  return batches;
}

std::shared_ptr<fashion::Classifier> fresh_model(const std::string& name) {
  torch::manual_seed(0);
  return fashion::make_model(name);
}

torch::optim::SGD momentum_sgd(const fashion::Classifier& model) {
  return torch::optim::SGD(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
}

Training::Training(std::shared_ptr<fashion::Classifier> model, std::vector<Batch> batches,
                   std::function<void()> average)
    : Training(model, std::move(batches), std::make_unique<torch::optim::SGD>(momentum_sgd(*model)),
               std::move(average)) {}

Training::Training(std::shared_ptr<fashion::Classifier> model, std::vector<Batch> batches,
                   std::unique_ptr<torch::optim::Optimizer> optimizer, std::function<void()> average)
    : model_(std::move(model)),
      batches_(std::move(batches)),
      average_(std::move(average)),
      optimizer_(std::move(optimizer)) {}

void Training::step() {
  const auto& batch = batches_[next_++ % batches_.size()];
  optimizer_->zero_grad();
  torch::nn::functional::cross_entropy(model_->forward(batch.images), batch.labels).backward();
  if (average_) average_();
  optimizer_->step();
}

void in_session(Launch& launch, const std::string& name, const std::function<void(Session&)>& body,
                const CheckpointConfig& config, const std::map<std::string, Dataset>& datasets) {
  const auto& world = launch.communicator();
  std::optional<detail::TemporaryFolder> scratch;
  if (launch.rank() == 0) {
    const char* folder = std::getenv(folder_variable);
    const auto parent = world.topology().num_nodes > 1 ? std::filesystem::current_path()  // the nodes share it
                        : folder != nullptr            ? std::filesystem::path(folder)
                                                       : detail::temporary_parent();
    scratch.emplace("muster-bench-", parent);
  }
  const auto storage = world.broadcast(scratch ? scratch->path().string() : "");
  const RunConfig run{.name = name, .storage_path = storage, .checkpoint_config = config};
  const auto result = TorchTrainer(launch, body, {.run_config = run, .datasets = datasets}).fit();
  if (result.error) throw *result.error;
}

}  // namespace muster::bench
