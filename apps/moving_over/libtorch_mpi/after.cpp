// The training of before.cpp, with muster.
//
//   mpirun -n 2 libtorch_mpi_after --name sine
#include <torch/torch.h>
#include <muster/muster.hpp>

void train(muster::Session& session) {
  auto net = session.prepare_model(
      torch::nn::Sequential(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1)));
  torch::optim::Adam optimizer(net->parameters(), 0.01);

  muster::Mean loss;
  auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"loss", loss}});
  state.restore();

  auto shard = session.get_dataset_shard("train");
  for ([[maybe_unused]] auto epoch : session.epochs(20)) {
    for (auto& batch : shard.iter_torch_batches({.batch_size = 32, .shuffle = true})) {
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
    const auto data = muster::Dataset::from_tensors({{"x", x}, {"y", torch::sin(x)}});
    return muster::TorchTrainer(
               launch, train, {.run_config = {.checkpoint_config = {.num_to_keep = 1}}, .datasets = {{"train", data}}})
        .fit();
  });
}
