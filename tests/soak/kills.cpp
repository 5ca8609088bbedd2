// A run that is killed over and over. Its end is compared with the end of an undisturbed run.
//   mpirun -n RANKS kills --end FILE --name NAME --storage FOLDER [--ceiling FILE]
// Prints "pid RANK PID" from each rank and "step N" after each step. Writes its final weights and optimizer state to
// FILE, and checks how often each sample was trained on. It takes no step beyond the number in the ceiling file: there
// it waits until it is killed or the number is raised.
#include "muster/muster.hpp"

#include <ATen/ATen.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace muster::soak {
namespace {

constexpr std::int64_t samples = 512, inputs = 16, batch = 16;

Dataset make_dataset() {
  at::manual_seed(5);
  const auto x = at::randn({samples, inputs});
  return Dataset::from_tensors({{"x", x}, {"y", at::sin(x.sum(1, true))}, {"id", at::arange(samples)}});
}

void append(std::ofstream& file, const at::Tensor& tensor) {
  const auto flat = tensor.detach().contiguous();
  file.write(static_cast<const char*>(flat.const_data_ptr()), static_cast<std::streamsize>(flat.nbytes()));
}

void wait_below(const std::string& ceiling, std::int64_t step) {
  if (ceiling.empty()) return;
  for (std::int64_t highest = 0; !(std::ifstream(ceiling) >> highest) || step > highest;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void train(Session& session, std::int64_t epochs, const std::string& end, const std::string& ceiling) {
  std::printf("pid %d %d\n", session.world_rank(), static_cast<int>(::getpid()));
  std::fflush(stdout);
  auto net = session.prepare_model(torch::nn::Sequential(torch::nn::Linear(inputs, 64), torch::nn::Tanh(),
                                                         torch::nn::Dropout(0.1), torch::nn::Linear(64, 64),
                                                         torch::nn::Tanh(), torch::nn::Linear(64, 1)));
  auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), 1e-3));
  auto taken = at::zeros({samples}, at::kLong);  // samples that this rank has taken
  auto state = session.state({{"net", net}, {"optimizer", optimizer}, {"taken", per_rank(taken)}});
  state.restore();
  auto shard = session.get_dataset_shard();
  for ([[maybe_unused]] const auto epoch : session.epochs(epochs))
    for (auto& part : shard.iter_torch_batches({.global_batch_size = batch, .shuffle = true})) {
      if (session.world_rank() == 0) wait_below(ceiling, session.global_step());
      optimizer.zero_grad();
      const auto loss = (net->forward(part["x"]) - part["y"]).square().mean();
      loss.backward();
      optimizer.step();
      taken.index_add_(0, part["id"], at::ones_like(part["id"]));
      if (session.global_step() % 7 == 0) session.report({{"loss", loss.item<double>()}}, state);
      if (session.world_rank() == 0) {
        std::printf("step %lld\n", static_cast<long long>(session.global_step()));
        std::fflush(stdout);
      }
    }
  session.communicator().all_reduce(std::span(taken.data_ptr<std::int64_t>(), static_cast<std::size_t>(samples)));
  if (!at::equal(taken, at::full({samples}, epochs, at::kLong)))
    throw std::logic_error("samples are lost or repeated: between " + std::to_string(taken.min().item<std::int64_t>()) +
                           " and " + std::to_string(taken.max().item<std::int64_t>()) + " times in place of " +
                           std::to_string(epochs));
  if (session.world_rank() != 0) return;
  std::ofstream file(end, std::ios::binary);
  for (const auto& [name, tensor] : Checkpoint::from_dict({{"net", net}, {"optimizer", optimizer}}).to_dict().tensors)
    append(file, tensor);
}

}  // namespace
}  // namespace muster::soak

int main(int argc, char** argv) {
  using namespace muster;
  Launch launch(argc, argv);
  std::string end, ceiling;
  std::int64_t epochs = 10;
  launch.app().add_option("--end", end);
  launch.app().add_option("--epochs", epochs);
  launch.app().add_option("--ceiling", ceiling);
  return launch.run([&] {
    return TorchTrainer(
               launch, [&](Session& session) { soak::train(session, epochs, end, ceiling); },
               {.run_config = {.checkpoint_config = {.num_to_keep = 2}}, .datasets = {{"train", soak::make_dataset()}}})
        .fit();
  });
}
