// A job that makes all that jobs make outside of the run's folder: memory that the ranks of a node share, a process
// group of another backend, a checkpoint in the temporary folder.
#include "muster/checkpoint.hpp"
#include "muster/launch.hpp"
#include "muster/model.hpp"
#include "muster/trainer.hpp"

#include <ATen/ops/ones.h>
#include <torch/nn/modules/linear.h>

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    const auto train = [](muster::Session& session, const muster::Config&) {
      auto net = session.prepare_model(torch::nn::Linear(1000, 100));
      net->forward(at::ones({1, 1000})).sum().backward();
      double best = 0.5;
      session.report({{"best", best}}, muster::Checkpoint::from_dict({{"best", best}}));
    };
    return muster::TorchTrainer(launch, train, muster::TorchTrainerOptions{}).fit();
  });
}
