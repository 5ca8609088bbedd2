// Trains a model made in Python (torch.export) on Fashion-MNIST, and saves the trained weights for Python.
//
//   python3 make_model.py resnet18 net.pt2                       # or use the model in data/
//   mpirun -n 2 exported --model net.pt2 --save trained.pt
//   python3 make_model.py --try resnet18 trained.pt
#include "models/data.hpp"

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <muster/exported.hpp>
#include <muster/muster.hpp>
#include <string>

namespace {

void train(muster::Session& session, const muster::Config& config) {
  // 1. The program in the file, with its weights. It is used like any other module.
  auto net = session.prepare_model(muster::load_exported(config.at("model").get<std::string>()));
  auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), config.at("lr").get<double>()));
  torch::optim::StepLR scheduler(optimizer, std::max(1U, config.at("epochs").get<unsigned>() * 2 / 3),
                                 config.at("lr_decay").get<double>());
  scheduler.step();  // the first call changes nothing; in Python, the constructor of StepLR makes it
  muster::Mean loss;
  auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"scheduler", scheduler}, {"loss", loss}});
  state.restore();

  auto train_shard = session.get_dataset_shard("train");
  auto test_shard = session.get_dataset_shard("test");
  for ([[maybe_unused]] auto epoch : session.epochs(config.at("epochs"))) {
    // 2. Training and validation. Dropout and batch-norm inside the program follow the module's mode. The program takes
    //    pictures as they are in the dataset and scales them itself.
    for (auto& batch : train_shard.iter_torch_batches({.batch_size = config.at("batch_size"), .shuffle = true})) {
      optimizer.zero_grad();
      const auto l = torch::cross_entropy_loss(net->forward(batch["x"]), batch["y"].to(torch::kLong));
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
    }
    scheduler.step();
    muster::Mean val_accuracy;
    {
      const auto evaluation = session.evaluation(net);
      for (auto& batch : test_shard.iter_torch_batches({.batch_size = 250})) {
        const auto predicted = net->forward(batch["x"]).argmax(1);
        val_accuracy.add(predicted.eq(batch["y"]).to(torch::kFloat).mean(), batch.size());
      }
    }
    session.report({{"loss", loss.take()}, {"val_accuracy", val_accuracy}}, state);
  }

  // 3. Save the trained weights, with batch-norm's statistics over all ranks, for the same class in Python.
  const auto evaluation = session.evaluation(net);
  if (session.world_rank() == 0)
    muster::save_torch(muster::state_dict(net), config.at("save").get<std::string>(), {.replace = true});
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  std::string train_set = example::data("fashion_mnist", "fashion-mnist-small.train.h5");
  std::string test_set = example::data("fashion_mnist", "fashion-mnist-small.test.h5");
  std::string model = example::data("exported", "cnn.pt2"), save = "trained.pt";
  int epochs = 5;
  launch.app().description("Trains a model from Python on Fashion-MNIST.");
  launch.app().add_option("--train", train_set, "Training set: columns x [28, 28] and y")->capture_default_str();
  launch.app().add_option("--test", test_set, "Test set")->capture_default_str();
  launch.app().add_option("--model", model, "A file of torch.export.save()")->capture_default_str();
  launch.app().add_option("--save", save, "Where to write the trained weights")->capture_default_str();
  launch.app().add_option("--epochs", epochs, "Passes over the training set")->capture_default_str();
  return launch.run([&] {
    return muster::TorchTrainer(launch, train,
                                {.train_loop_config = {{"model", model},
                                                       {"save", save},
                                                       {"epochs", epochs},
                                                       {"lr", 1e-3},
                                                       {"lr_decay", 0.1},
                                                       {"batch_size", 64}},
                                 .dataset_config = {.split_all = true},
                                 .run_config = {.checkpoint_config = {.num_to_keep = 1}},
                                 .datasets = {{"train", train_set}, {"test", test_set}}})
        .fit();
  });
}
