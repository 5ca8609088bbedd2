// A convolutional network learns the heat equation from samples that a solver (heat.c) computes meanwhile.
//
//   mpirun -n 2 heat : -n 2 heat_train
//   mpirun -n 2 heat : -n 2 heat_train --set epochs=40 --name longer --tensorboard
//   mpirun -n 2 heat_train --connect heat.live        (in a job of its own; the solver: heat --connect heat.live)
//   mpirun -n 2 heat_train --from heat.h5             (from a file of heat --to, for comparison)
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <muster/live.hpp>
#include <muster/muster.hpp>

#include <map>
#include <optional>
#include <string>

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
  torch::Tensor picture;
  for (auto& batch : session.get_dataset_shard("validation").iter_torch_batches({.batch_size = 16})) {
    const auto prediction = predict(net, batch);
    loss.add(torch::mse_loss(prediction, batch["after"]), batch.size());
    const auto error = (prediction[0] - batch["after"][0]).abs();
    picture = torch::cat({batch["after"][0], prediction[0], error / error.max().clamp_min(1e-6)}, 1).clamp(0, 1);
  }
  // Truth, prediction and error of one sample side by side; the largest error is white.
  if (picture.defined()) session.log_image("truth, prediction, error", picture);
  return loss;
}

/// `live`: null if the samples are in a file.
void train(muster::Session& session, const muster::Config& config, muster::Live* live) {
  auto net = session.prepare_model(make_net());
  torch::optim::Adam optimizer(net->parameters(), config.at("lr").get<double>());
  auto state = live ? session.state({{"model", net}, {"optimizer", optimizer}, {"live", *live}})
                    : session.state({{"model", net}, {"optimizer", optimizer}});
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
    if (live && live->ended()) break;  // the solvers have ended, and each sample was used
    if (live && epoch + 1 == config.at("epochs")) live->stop_solvers();
  }
}

}  // namespace

int main(int argc, char** argv) {
  muster::LiveWorld world;
  muster::Launch launch(argc, argv, world.part());
  std::string from, connect_file;
  launch.app().description("Learns the heat equation from a solver that runs beside it, or from its file.");
  launch.app().add_option("--from", from, "A file of heat --to, instead of the running solver");
  launch.app().add_option("--connect", connect_file, "A file by which the solver of another job finds this one");
  return launch.run([&] {
    std::optional<muster::Live> live;
    std::map<std::string, muster::Dataset> datasets;
    if (from.empty()) {
      live.emplace(launch, "heat",
                   muster::LiveOptions{.bytes = 4 << 20,
                                       .watermark = 64,
                                       .samples_per_epoch = 1024,
                                       .validation_every = 10,
                                       .connect_file = connect_file});
      datasets = {{"train", live->dataset()}, {"validation", live->validation()}};
    } else {
      auto parts = muster::Dataset(from).random_split({0.9, 0.1});
      datasets = {{"train", parts[0]}, {"validation", parts[1]}};
    }
    return muster::TorchTrainer(launch,
                                [&](muster::Session& session, const muster::Config& config) {
                                  train(session, config, live ? &*live : nullptr);
                                },
                                {
                                    .train_loop_config = {{"epochs", 20}, {"lr", 2e-3}},
                                    .dataset_config = {.split_all = true},
                                    .run_config = {.checkpoint_config = {.num_to_keep = 1}},
                                    .datasets = datasets,
                                })
        .fit();
  });
}
