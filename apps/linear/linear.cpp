// Fits y = 2x + 1 to 200 samples in memory. The loss ends at 0.09 or less.
//
//   mpirun -n 3 linear
#include <torch/torch.h>

#include <iostream>
#include <muster/muster.hpp>

void train(muster::Session& session, const muster::Config& config) {
  // 1. The model for data-parallel training: all ranks start with the same weights; backward() averages the gradients.
  auto net = session.prepare_model(
      torch::nn::Sequential(torch::nn::Linear(1, 32), torch::nn::ReLU(), torch::nn::Linear(32, 1)));
  torch::optim::Adam optimizer(net->parameters(), config.at("lr").get<double>());

  // 2. The state to save. It is restored when the program is started again with the same --name. The state includes the
  //    loss, since a run may be stopped in the middle of an epoch.
  muster::Mean loss;
  auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"loss", loss}});
  state.restore();

  auto shard = session.get_dataset_shard("train");
  const auto epochs = config.at("epochs").get<std::int64_t>();
  for (auto epoch : session.epochs(epochs)) {
    // 3. One pass over the samples; each rank gets its part.
    for (auto& batch : shard.iter_torch_batches(
             {.batch_size = 32, .shuffle = true, .dtypes = {{"x", torch::kFloat}, {"y", torch::kFloat}}})) {
      optimizer.zero_grad();
      auto output = net->forward(batch["x"].unsqueeze(1));
      auto l = torch::mse_loss(output.squeeze(1), batch["y"]);
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
    }
    if (epoch % 20 == 0 && session.world_rank() == 0)
      std::cout << "epoch: " << epoch << "/" << epochs << ", loss: " << loss.value() << std::endl;

    // 4. Report the mean over all ranks, and save a checkpoint.
    session.report({{"loss", loss.take()}, {"epoch", epoch}}, state);
  }
}

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    muster::Json samples;
    for (int x = 0; x < 200; ++x) samples.push_back({{"x", x}, {"y", 2 * x + 1}});
    muster::TorchTrainerOptions options{
        .train_loop_config = {{"lr", 0.1}, {"epochs", 200}},
        .run_config = {.checkpoint_config = {.num_to_keep = 1}},
        .datasets = {{"train", muster::Dataset::from_items(samples)}},
    };
    return muster::TorchTrainer(launch, train, options).fit();
  });
}
