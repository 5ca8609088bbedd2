// Searches for good settings: many trials of a small network in parallel; bad trials end early.
//
//   mpirun -n 2 sweep --name search
//   mpirun -n 8 sweep --samples 8 --ranks-per-trial 2 --name large
//
// Start it again with the same --name: trials that are done are kept, and the others continue.
#include "models/data.hpp"

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <muster/muster.hpp>
#include <string>

namespace {

torch::Tensor normalize(const torch::Tensor& images) {
  return images.to(torch::kFloat).div_(255).sub_(0.28604).div_(0.32025);
}

// 1. A training function as usual. Its configuration has the settings that the sweep has chosen.
void train(muster::Session& session, const muster::Config& config) {
  const auto width = config.at("width").get<std::int64_t>();
  auto net = session.prepare_model(torch::nn::Sequential(torch::nn::Flatten(), torch::nn::Linear(28 * 28, width),
                                                         torch::nn::ReLU(), torch::nn::Linear(width, 10)));
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(config.at("lr").get<double>()).momentum(0.9));
  muster::Mean loss;
  auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"loss", loss}});
  state.restore();

  auto train_shard = session.get_dataset_shard("train");
  auto test_shard = session.get_dataset_shard("test");
  for ([[maybe_unused]] auto epoch : session.epochs(config.at("epochs"))) {
    muster::Mean val_accuracy;
    for (auto& batch : train_shard.iter_torch_batches({.global_batch_size = 64, .shuffle = true})) {
      optimizer.zero_grad();
      const auto l = torch::cross_entropy_loss(net->forward(normalize(batch["x"])), batch["y"].to(torch::kLong));
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
    }
    {
      const auto evaluation = session.evaluation(net);
      for (auto& batch : test_shard.iter_torch_batches()) {
        const auto predicted = net->forward(normalize(batch["x"])).argmax(1);
        val_accuracy.add(predicted.eq(batch["y"]).to(torch::kFloat).mean(), batch.size());
      }
    }
    session.report({{"loss", loss.take()}, {"val_accuracy", val_accuracy}}, state);
  }
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  std::string train_set = example::data("fashion_mnist", "fashion-mnist-small.train.h5");
  std::string test_set = example::data("fashion_mnist", "fashion-mnist-small.test.h5");
  int samples = 4, ranks_per_trial = 1, epochs = 9;
  launch.app().description("Searches for the learning rate and the width of a small network on Fashion-MNIST.");
  launch.app().add_option("--train", train_set, "Training set: columns x [28, 28] and y")->capture_default_str();
  launch.app().add_option("--test", test_set, "Test set")->capture_default_str();
  launch.app().add_option("--samples", samples, "Learning rates to try for each width")->capture_default_str();
  launch.app().add_option("--ranks-per-trial", ranks_per_trial, "Ranks that train together")->capture_default_str();
  launch.app().add_option("--epochs", epochs, "Most passes over the training set")->capture_default_str();
  return launch.run([&] {
    // 2. One trial.
    muster::TorchTrainer trainer(launch, train,
                                 {
                                     .train_loop_config = {{"lr", 0.01}, {"width", 64}, {"epochs", epochs}},
                                     .dataset_config = {.split_all = true},
                                     .run_config = {.checkpoint_config = {.num_to_keep = 1}},
                                     .datasets = {{"train", train_set}, {"test", test_set}},
                                 });
    // 3. The space to search. After 1 and after 3 epochs, the better third of the trials continues.
    auto result =
        muster::Sweep(launch, trainer.as_trainable(),
                      {
                          .space = {{"lr", muster::log_uniform(1e-4, 1)}, {"width", muster::grid({32, 128})}},
                          .num_samples = samples,
                          .ranks_per_trial = ranks_per_trial,
                          .metric = "val_accuracy",
                          .mode = muster::ScoreOrder::max,
                          .scheduler = muster::asha({.grace_period = 1, .reduction_factor = 3, .max_t = epochs}),
                      })
            .fit();
    // 4. The best trial; its model can be loaded from its checkpoint.
    if (const auto best = result.best(); best && launch.rank() == 0)
      std::cout << best->checkpoint->path().string() << ": accuracy " << best->metrics.at("val_accuracy") << std::endl;
    return result;
  });
}
