// For script.py: trains a module of TorchScript, made in Python, on all ranks, and saves it for Python.
//   mpirun -n 2 script_peer NET.pt TRAINED.pt LOSSES.txt
#include <torch/torch.h>
#include <muster/muster.hpp>
#include <muster/script.hpp>

#include <filesystem>
#include <fstream>
#include <iomanip>
#include <string>
#include <vector>

namespace {

constexpr int steps = 30, batch = 8, classes = 5;

/// As in script.py.
at::Tensor wave(at::IntArrayRef sizes, double frequency, double phase) {
  const auto count = at::empty(sizes).numel();
  return at::sin(frequency * at::arange(count, at::kDouble) + phase).to(at::kFloat).view(sizes);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string net_file = argv[1], trained_file = argv[2], losses_file = argv[3];
  const auto storage = std::filesystem::path(losses_file).replace_extension("runs").string();
  std::vector<std::string> words{argv[0], "--storage", storage, "--progress", "none"};
  std::vector<char*> flags;
  for (auto& word : words) flags.push_back(word.data());
  static_cast<void>(argc);

  muster::Launch launch(static_cast<int>(flags.size()), flags.data());
  return launch.run([&] {
    muster::TorchTrainer trainer(launch, [&](muster::Session& session, const muster::Config&) {
      auto net = session.prepare_model(muster::load_script(net_file));
      auto optimizer =
          session.prepare_optimizer(torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)),
                                    {.fuse = muster::Fuse::always});
      const bool first = session.world_rank() == 0;
      std::ofstream losses;
      if (first) losses.open(losses_file);
      for (int step = 0; step < steps; ++step) {
        const int seed = step * session.world_size() + session.world_rank();
        const auto x = wave({batch, 1, 6, 6}, 0.37, seed);
        const auto y = (at::arange(batch, at::kLong) * 3 + seed) % classes;
        optimizer.zero_grad();
        auto loss = torch::nn::functional::cross_entropy(net->forward(x), y);
        loss.backward();
        optimizer.step();
        losses << std::setprecision(17) << session.mean(loss.to(at::kDouble)).item<double>() << '\n';
      }
      const auto evaluation = session.evaluation(net);
      if (first) net->save(trained_file);
    });
    return trainer.fit();
  });
}
