// Classifies clothes: Fashion-MNIST with ResNet-18, on any number of ranks.
//
//   mpirun -n 2 fashion_mnist
//   mpirun -n 4 fashion_mnist --model cnn --epochs 3 --name trial
//   mpirun -n 2 fashion_mnist --train train.h5 --test test.h5
//
// Start it again with the same --name, and it continues from its newest checkpoint.
#include "models/data.hpp"
#include "models/models.hpp"

#include <torch/optim/adam.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/types.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <muster/muster.hpp>
#include <numeric>
#include <optional>
#include <string>

namespace {

/// Turns bytes into numbers around 0, scaled as in Ray Train's tutorial, and adds a channel: [N, 28, 28] to [N, 1, 28,
/// 28].
torch::Tensor normalize(const torch::Tensor& images) {
  return images.to(torch::kFloat).div_(255).sub_(0.28604).div_(0.32025).unsqueeze_(1);
}

/// Returns the model's name, which is needed to load a checkpoint.
std::string train(muster::Session& session, const muster::Config& config) {
  // 1. The model for data-parallel training: all ranks start with the same weights, and gradients are averaged in
  //    backward(), or by the optimizer if that is faster.
  const auto model = config.at("model").get<std::string>();
  auto net = session.prepare_model(fashion::make_model(model));
  auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), config.at("lr").get<double>()));
  const auto epochs = config.at("epochs").get<std::int64_t>();
  torch::optim::StepLR scheduler(optimizer, static_cast<unsigned>(std::max<std::int64_t>(1, epochs * 2 / 3)),
                                 config.at("lr_decay").get<double>());
  scheduler.step();  // the first call changes nothing; in Python, the constructor of StepLR makes it

  // 2. The state to save and restore. It always includes the epoch, the position in the data and the random state. It
  //    also includes the means here, since a run may be stopped in the middle of an epoch.
  muster::Mean loss, accuracy;
  auto state = session.state(
      {{"model", net}, {"optimizer", optimizer}, {"scheduler", scheduler}, {"loss", loss}, {"accuracy", accuracy}});
  state.restore();

  // 3. The data: each rank gets its part of every step.
  const muster::BatchOptions batches{.batch_size = config.at("batch_size"), .shuffle = true};
  auto train_shard = session.get_dataset_shard("train");
  auto test_shard = session.get_dataset_shard("test");

  for ([[maybe_unused]] auto epoch : session.epochs(epochs)) {
    // 4. One pass over the training set.
    for (auto& batch : train_shard.iter_torch_batches(batches)) {
      const auto labels = batch["y"].to(torch::kLong);
      optimizer.zero_grad();
      const auto logits = net->forward(normalize(batch["x"]));
      const auto l = torch::cross_entropy_loss(logits, labels);
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
      accuracy.add(logits.argmax(1).eq(labels).to(torch::kFloat).mean(), batch.size());
      // Save a checkpoint in the middle of an epoch, if the user wants that.
      const auto every = config.at("checkpoint_steps").get<std::int64_t>();
      if (every > 0 && session.global_step() % every == 0)
        session.report({{"loss", loss}, {"accuracy", accuracy}}, state);
    }

    scheduler.step();

    // 5. Validation on the test set, which is divided among the ranks, too; an empty last batch does not count.
    muster::Mean val_loss, val_accuracy;
    {
      const auto evaluation = session.evaluation(net);
      for (auto& batch : test_shard.iter_torch_batches({.batch_size = 250})) {
        const auto labels = batch["y"].to(torch::kLong);
        const auto logits = net->forward(normalize(batch["x"]));
        val_loss.add(torch::cross_entropy_loss(logits, labels), batch.size());
        val_accuracy.add(logits.argmax(1).eq(labels).to(torch::kFloat).mean(), batch.size());
      }
    }

    // 6. Report the metrics over all ranks, and save a checkpoint from which the next epoch can begin.
    session.report(
        {{"loss", loss.take()}, {"accuracy", accuracy.take()}, {"val_loss", val_loss}, {"val_accuracy", val_accuracy}},
        state);
  }
  return model;
}

/// Classifies the first images of the test set with the model in a checkpoint.
void try_out(const muster::Checkpoint& checkpoint, const std::string& model, const muster::Dataset& test) {
  static constexpr const char* names[] = {"T-shirt", "trousers", "pullover", "dress", "coat",
                                          "sandal",  "shirt",    "sneaker",  "bag",   "ankle boot"};
  auto net = fashion::make_model(model);
  checkpoint.load("model", net);
  net->eval();
  const torch::NoGradGuard no_grad;

  std::vector<std::int64_t> samples(static_cast<std::size_t>(std::min<std::int64_t>(10, test.count())));
  std::iota(samples.begin(), samples.end(), 0);
  const auto batch = test.read(samples);
  const auto predicted = net->forward(normalize(batch["x"])).argmax(1);
  for (std::int64_t i = 0; i < predicted.size(0); ++i)
    std::cout << "image " << i << ": " << names[predicted[i].item<std::int64_t>()] << ", it is "
              << names[batch["y"][i].item<std::int64_t>()] << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  const auto small_set = example::data("fashion_mnist", "fashion-mnist-small.train.h5");
  std::string train_set = small_set;
  std::string test_set = example::data("fashion_mnist", "fashion-mnist-small.test.h5");
  std::string model = "resnet18";
  std::optional<int> epochs;
  launch.app().description("Classifies clothes: Fashion-MNIST with ResNet-18 or a smaller model.");
  launch.app().add_option("--train", train_set, "Training set: columns x [28, 28] and y")->capture_default_str();
  launch.app().add_option("--test", test_set, "Test set")->capture_default_str();
  launch.app()
      .add_option("--model", model, "resnet18, cnn, mlp or mlp50")
      ->capture_default_str()
      ->check(CLI::IsMember({"resnet18", "cnn", "mlp", "mlp50"}));
  launch.app().add_option("--epochs", epochs, "Passes over the training set; 10, of the small set 5");
  return launch.run([&] {
    // The small set has a tenth of the images; smaller steps, and a lower learning rate at the end, partly make up for
    // it.
    const bool small = train_set == small_set;
    auto result =
        muster::TorchTrainer(
            launch, train,
            {
                .train_loop_config = {{"model", model},
                                      {"epochs", epochs.value_or(small ? 5 : 10)},
                                      {"lr", 1e-3},
                                      {"lr_decay", small ? 0.1 : 1.0},
                                      {"batch_size", small ? 64 : 128},
                                      {"checkpoint_steps", 0}},
                .dataset_config = {.split_all = true},
                .run_config = {.checkpoint_config = {.num_to_keep = 2, .checkpoint_score_attribute = "val_accuracy"}},
                .datasets = {{"train", train_set}, {"test", test_set}},
            })
            .fit();
    // 7. Load the best model; if no epoch was trained, there is none.
    if (!result.error && !result.best_checkpoints.empty() && launch.rank() == 0)
      try_out(result.best_checkpoints.front().first, result.return_value.get<std::string>(), test_set);
    return result;
  });
}
