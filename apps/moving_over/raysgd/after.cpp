// The training of before.py, with muster.
//
//   mpirun -n 2 raysgd_after --storage STORAGE --name sine
#include <torch/torch.h>
#include <muster/muster.hpp>

#include <iostream>

struct Sine : muster::TrainingOperator {
  void setup(const muster::Config& config) override {
    torch::nn::Sequential net(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
    torch::optim::Adam optimizer(net->parameters(), config.at("lr").get<double>());
    register_training(Components{.models = net, .optimizers = std::move(optimizer), .criterion = torch::nn::MSELoss()});
    const auto x = torch::linspace(-3, 3, 1001).unsqueeze(1);
    register_data({muster::Dataset::from_tensors({{"x", x}, {"y", torch::sin(x)}}),
                   {.batch_size = config.at("batch_size"), .shuffle = true}});
  }
};

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    muster::OperatorTrainer<Sine> trainer(launch, {.config = {{"lr", 0.01}, {"batch_size", 32}}, .num_workers = 2});
    muster::Json stats;
    for (int epoch = 0; epoch < 20; ++epoch) stats = trainer.train();
    if (launch.rank() == 0) std::cout << "loss " << stats.at("train_loss") << std::endl;
    trainer.save("sine.checkpoint");
    trainer.shutdown();
  });
}
