// Fits y = 2x + 1 to 200 samples in memory; the loss ends at 0.09 or less.
//
//   mpirun -n 3 linear
#include <torch/torch.h>
#include <muster/muster.hpp>

void train(muster::Session& session, const muster::Config& config) {
  auto net = session.prepare_model(
      torch::nn::Sequential(torch::nn::Linear(1, 32), torch::nn::ReLU(), torch::nn::Linear(32, 1)));
  torch::optim::Adam optimizer(net->parameters(), config.at("lr").get<double>());

  auto state = session.state({{"model", net}, {"optimizer", optimizer}});
  state.restore();

  auto shard = session.get_dataset_shard("train");
  for (auto epoch : session.epochs(config.at("epochs"))) {
    muster::Mean loss;
    for (auto& batch : shard.iter_torch_batches({.batch_size = 32, .shuffle = true})) {
      optimizer.zero_grad();
      auto l = torch::mse_loss(net->forward(batch["x"]), batch["y"]);
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
    }
    if (epoch % 20 == 19) session.report({{"loss", loss}}, state);
  }
}

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    auto x = torch::arange(200, torch::kFloat).unsqueeze(1) / 200;
    muster::TorchTrainerOptions options{
        .train_loop_config = {{"lr", 0.01}, {"epochs", 200}},
        .run_config = {.checkpoint_config = {.num_to_keep = 1}},
        .datasets = {{"train", muster::Dataset::from_tensors({{"x", x}, {"y", 2 * x + 1}})}},
    };
    return muster::TorchTrainer(launch, train, options).fit();
  });
}
