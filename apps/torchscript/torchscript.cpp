// Trains a model that was made in Python, and gives it back: TorchScript on Fashion-MNIST.
//
//   python3 make_model.py model.pt                               # or the one in data/
//   mpirun -n 2 torchscript --model model.pt --save trained.pt
//   python3 make_model.py --show trained.pt
#include "models/data.hpp"

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <muster/muster.hpp>
#include <muster/script.hpp>
#include <string>

namespace {

torch::Tensor normalize(const torch::Tensor& images) {
  return images.to(torch::kFloat).div_(255).sub_(0.28604).div_(0.32025).unsqueeze_(1);
}

void train(muster::Session& session, const muster::Config& config) {
  // 1. The file's program with its weights; from here on it is a module like any other.
  auto net = session.prepare_model(muster::load_script(config.at("model").get<std::string>()));
  auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), config.at("lr").get<double>()));
  muster::Mean loss;
  auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"loss", loss}});
  state.restore();

  auto train_shard = session.get_dataset_shard("train");
  auto test_shard = session.get_dataset_shard("test");
  for ([[maybe_unused]] auto epoch : session.epochs(config.at("epochs"))) {
    // 2. Training and validation. Dropout and batch-norm inside the program follow the module's mode.
    muster::Mean val_accuracy;
    for (auto& batch : train_shard.iter_torch_batches({.batch_size = config.at("batch_size"), .shuffle = true})) {
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

  // 3. Write the trained program, for Python's torch.jit.load().
  const auto evaluation = session.evaluation(net);
  if (session.world_rank() == 0) net->save(config.at("save").get<std::string>(), {.replace = true});
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  std::string train_set = example::data("fashion_mnist", "fashion-mnist-small.train.h5");
  std::string test_set = example::data("fashion_mnist", "fashion-mnist-small.test.h5");
  std::string model = example::data("torchscript", "model.pt"), save = "trained.pt";
  int epochs = 5;
  launch.app().description("Trains a model that Python has made, on Fashion-MNIST.");
  launch.app().add_option("--train", train_set, "Training set: columns x [28, 28] and y")->capture_default_str();
  launch.app().add_option("--test", test_set, "Test set")->capture_default_str();
  launch.app().add_option("--model", model, "What torch.jit.save() has written")->capture_default_str();
  launch.app().add_option("--save", save, "Where it is written, trained")->capture_default_str();
  launch.app().add_option("--epochs", epochs, "Passes over the training set")->capture_default_str();
  return launch.run([&] {
    return muster::TorchTrainer(
               launch, train,
               {
                   .train_loop_config =
                       {{"model", model}, {"save", save}, {"epochs", epochs}, {"lr", 2e-3}, {"batch_size", 32}},
                   .dataset_config = {.split_all = true},
                   .run_config = {.checkpoint_config = {.num_to_keep = 1}},
                   .datasets = {{"train", train_set}, {"test", test_set}},
               })
        .fit();
  });
}
