// Four calls of an operator's train(), in the third of which the last rank is killed, once, or throws; or one rank
// throws in main, after the second. The script beside it has it started again. Lines of its output: "trained STEP" from
// rank 0 for each batch, "call N: RESULTS", "weight W". --outlives: the trainer lives longer than the launch.
#include "muster/launch.hpp"
#include "muster/operator.hpp"

#include <ATen/ops/arange.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/loss.h>
#include <torch/optim/sgd.h>

#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>

namespace {

struct Line : muster::TrainingOperator {
  void setup(const muster::Config& config) override {
    torch::nn::Linear net(1, 1);
    register_training(Components{
        .models = net, .optimizers = torch::optim::SGD(net->parameters(), 0.1), .criterion = torch::nn::MSELoss()});
    const auto x = at::arange(24, at::kFloat).unsqueeze(1) / 24;
    register_data({muster::Dataset::from_tensors({{"x", x}, {"y", 3 * x - 1}}),
                   {.batch_size = config.at(muster::BATCH_SIZE), .shuffle = true}});
  }
  muster::Metrics train_batch(muster::Batch& batch, const muster::BatchInfo& info) override {
    if (info.global_step == config().at("dies_at") && world_rank() == session().world_size() - 1 && dies_once())
      ::kill(::getpid(), SIGKILL);
    if (info.global_step == config().at("throws_at") && world_rank() == session().world_size() - 1)
      throw std::runtime_error("the loss is a teapot");
    if (world_rank() == 0) std::printf("trained %lld\n", static_cast<long long>(info.global_step)), std::fflush(stdout);
    return TrainingOperator::train_batch(batch, info);
  }
  bool dies_once() const {
    const std::filesystem::path died = config().at("died").get<std::string>();
    if (std::filesystem::exists(died)) return false;
    std::ofstream(died) << "";
    return true;
  }
};

}  // namespace

int main(int argc, char** argv) {
  std::unique_ptr<muster::OperatorTrainer<Line>> kept;
  muster::Launch launch(argc, argv);
  bool outlives = false;
  launch.app().add_flag("--outlives", outlives);
  return launch.run([&] {
    const auto died = *launch.flags().storage / "died";
    const muster::OperatorTrainerOptions options{.config = {{muster::BATCH_SIZE, 6},
                                                            {"dies_at", -1},
                                                            {"died", died.string()},
                                                            {"throws_at", -1},
                                                            {"main_throws", -1}},
                                                 .num_workers = launch.size()};
    if (outlives) {
      kept = std::make_unique<muster::OperatorTrainer<Line>>(launch, options);
      kept->train();
      return;
    }
    muster::OperatorTrainer<Line> trainer(launch, options);
    for (int call = 1; call <= 4; ++call) {
      const auto results = trainer.train();
      if (launch.rank() == 0) std::printf("call %d: %s\n", call, results.dump().c_str()), std::fflush(stdout);
      if (call == 2 && trainer.get_local_operator().config().at("main_throws") == launch.rank())
        throw std::runtime_error("main is a teapot");
    }
    const auto weight = trainer.state_dict().tensors.at("model/weight").item<float>();
    if (launch.rank() == 0) std::printf("weight %.4f\n", weight);
    trainer.shutdown();
  });
}
