// The training of before.py, with muster.
//
//   mpirun -n 2 ray_train_after --storage STORAGE --name sine
#include <torch/torch.h>
#include <muster/muster.hpp>

#include <iostream>

void train_loop_per_worker(muster::Session& session, const muster::Config& config) {
  auto net = session.prepare_model(
      torch::nn::Sequential(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1)));
  torch::optim::Adam optimizer(net->parameters(), config.at("lr").get<double>());

  muster::Mean loss;
  auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"loss", loss}});
  state.restore();

  auto shard = session.get_dataset_shard("train");
  for ([[maybe_unused]] auto epoch : session.epochs(config.at("epochs"))) {
    for (auto& batch : shard.iter_torch_batches({.batch_size = config.at("batch_size"), .shuffle = true})) {
      optimizer.zero_grad();
      const auto l = torch::mse_loss(net->forward(batch["x"]), batch["y"]);
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
    }
    session.report({{"loss", loss.take()}}, state);
  }
}

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    const auto x = torch::linspace(-3, 3, 1001).unsqueeze(1);
    muster::TorchTrainer trainer(
        launch, train_loop_per_worker,
        {
            .train_loop_config = {{"lr", 0.01}, {"batch_size", 32}, {"epochs", 20}},
            .datasets = {{"train", muster::Dataset::from_tensors({{"x", x}, {"y", torch::sin(x)}})}},
        });
    const auto result = trainer.fit();
    if (launch.rank() == 0 && !result.error) std::cout << "loss " << result.metrics.at("loss") << std::endl;
    return result;
  });
}
