// Trains an MLP until it is asked to stop, with an asynchronous save about every second, for tests/soak/goodput.
#include "muster/muster.hpp"

#include <torch/nn.h>
#include <torch/optim.h>

#include <chrono>
#include <limits>
#include <string>

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::int64_t samples = 8192, inputs = 784, classes = 10;

void train(muster::Session& session, const muster::Config&) {
  auto net = session.prepare_model(torch::nn::Sequential(torch::nn::Linear(inputs, 1024), torch::nn::ReLU(),
                                                         torch::nn::Linear(1024, 1024), torch::nn::ReLU(),
                                                         torch::nn::Linear(1024, classes)));
  auto optimizer = session.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.01));
  auto state = session.state({{"net", net}, {"optimizer", optimizer}});
  state.restore();
  auto shard = session.get_dataset_shard();
  auto saved = Clock::now();
  for ([[maybe_unused]] const auto epoch : session.epochs(std::numeric_limits<std::int32_t>::max()))
    for (auto& batch : shard.iter_torch_batches({.batch_size = 64, .shuffle = true})) {
      optimizer.zero_grad();
      const auto loss = torch::nn::functional::cross_entropy(net->forward(batch["x"]), batch["y"]);
      loss.backward();
      optimizer.step();
      // Rank 0's clock decides for all.
      if (session.communicator().broadcast(
              std::string(1, Clock::now() - saved < std::chrono::seconds(1) ? 'n' : 'y')) == "n")
        continue;
      saved = Clock::now();
      session.report({{"loss", loss.item<double>()}}, state);
    }
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    torch::manual_seed(1);
    const auto data = muster::Dataset::from_tensors(
        {{"x", torch::randn({samples, inputs})}, {"y", torch::randint(classes, {samples})}});
    muster::TorchTrainerOptions options{.datasets = {{"train", data}}};
    options.run_config.checkpoint_config = {.num_to_keep = 2, .async_save = true};
    return muster::TorchTrainer(launch, train, options).fit();
  });
}
