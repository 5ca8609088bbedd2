// A convolutional network learns the heat equation from samples that a solver (heat.c) computes meanwhile.
//
//   mpirun -n 2 heat : -n 2 heat_train
//   mpirun -n 2 heat : -n 2 heat_train --set epochs=40 --name longer --tensorboard
#include <torch/torch.h>

#include <muster/live.hpp>
#include <muster/muster.hpp>

namespace {

torch::nn::Sequential make_net() {
  using namespace torch::nn;
  const auto layer = [](int in, int out) { return Conv2d(Conv2dOptions(in, out, 5).padding(2)); };
  return Sequential(layer(1, 16), Tanh(), layer(16, 16), Tanh(), layer(16, 16), Tanh(), layer(16, 1));
}

/// The network predicts how the square changes.
torch::Tensor predict(torch::nn::Sequential& net, const muster::Batch& batch) {
  return batch["before"] + net->forward(batch["before"].unsqueeze(1)).squeeze(1);
}

muster::Mean validate(muster::Session& session, torch::nn::Sequential& net) {
  const auto scope = session.evaluation(net);
  muster::Mean loss;
  for (auto& batch : session.get_dataset_shard("validation").iter_torch_batches({.batch_size = 16})) {
    const auto prediction = predict(net, batch);
    loss.add(torch::mse_loss(prediction, batch["after"]), batch.size());
    // Truth, prediction and error of one sample.
    session.log_image(
        "heat",
        torch::cat({batch["after"][0], prediction[0], (prediction[0] - batch["after"][0]).abs()}, 1).clamp(0, 1));
  }
  return loss;
}

void train(muster::Session& session, const muster::Config& config, muster::Live& live) {
  auto net = session.prepare_model(make_net());
  torch::optim::Adam optimizer(net->parameters(), config.at("lr").get<double>());
  auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"live", live}});
  state.restore();

  for (const auto epoch : session.epochs(config.at("epochs"))) {
    muster::Mean loss;
    for (auto& batch : session.get_dataset_shard("train").iter_torch_batches({.batch_size = 16})) {
      optimizer.zero_grad();
      const auto l = torch::mse_loss(predict(net, batch), batch["after"]);
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
    }
    const auto val_loss = validate(session, net);
    session.report({{"loss", loss}, {"val_loss", val_loss}}, state);
    if (live.ended()) break;  // the solvers have ended, and each sample was used
    if (epoch + 1 == config.at("epochs")) live.stop_solvers();
  }
}

}  // namespace

int main(int argc, char** argv) {
  muster::LiveWorld world;
  muster::Launch launch(argc, argv, world.part());
  return launch.run([&] {
    muster::Live live(launch, "heat",
                      {.bytes = 4 << 20, .watermark = 64, .samples_per_epoch = 1024, .validation_every = 10});
    return muster::TorchTrainer(
               launch, [&](muster::Session& session, const muster::Config& config) { train(session, config, live); },
               {
                   .train_loop_config = {{"epochs", 20}, {"lr", 2e-3}},
                   .dataset_config = {.split_all = true},
                   .run_config = {.checkpoint_config = {.num_to_keep = 1}},
                   .datasets = {{"train", live.dataset()}, {"validation", live.validation()}},
               })
        .fit();
  });
}
