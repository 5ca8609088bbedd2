// A random run that is cut off, by a kill or an exception on one rank, and started again until it ends.
//   restart SEED [flags of muster]
// The step after which this start is cut off is in MUSTER_SOAK_CUT (none: it goes through), what happens then in
// MUSTER_SOAK_HOW (kill, throw). Rank 0 of a run that has ended prints what its weights are. The script `restarts`
// beside it starts it, and compares them with those of a run on one rank that nothing has cut off.
#include "muster/muster.hpp"

#include <ATen/ATen.h>
#include <signal.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

/// What the seed decides.
struct Run {
  std::int64_t samples, batch, epochs;
  int width;
  bool fuse, adam;
  std::int64_t report_every;

  explicit Run(std::uint64_t seed)
      : samples(20 + static_cast<std::int64_t>(seed * 7 % 41)),
        batch(12),
        epochs(2 + static_cast<std::int64_t>(seed % 2)),
        width(seed % 5 == 0 ? 200 : 8),
        fuse(seed % 2 == 0),
        adam(seed % 3 != 0),
        report_every(1 + static_cast<std::int64_t>(seed % 3)) {}
};

at::Tensor numbers(at::IntArrayRef sizes, double shift) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return at::sin(at::arange(count, at::kDouble) * 1.7 + shift).view(sizes);
}

torch::nn::Sequential make_net(const Run& run) {
  torch::nn::Sequential net(torch::nn::Linear(3, run.width), torch::nn::Tanh(), torch::nn::Linear(run.width, run.width),
                            torch::nn::Tanh(), torch::nn::Linear(run.width, 1));
  net->to(at::kDouble);
  const at::NoGradGuard no_grad;
  double shift = 0;
  for (auto& p : net->parameters()) p.copy_(numbers(p.sizes(), ++shift) * 0.3);
  return net;
}

template <class O, class Options>
void train(muster::Session& session, const Run& run, const Options& options, std::vector<at::Tensor>& weights) {
  const char* const cut = std::getenv("MUSTER_SOAK_CUT");
  const char* const how = std::getenv("MUSTER_SOAK_HOW");
  const auto last = cut != nullptr ? std::atoll(cut) : -1;
  const bool mine = session.world_rank() == static_cast<int>(last % session.world_size());
  auto net = session.prepare_model(make_net(run));
  auto optimizer = session.prepare_optimizer(O(net->parameters(), options),
                                             {.fuse = run.fuse ? muster::Fuse::always : muster::Fuse::never});
  auto state = session.state({{"model", net}, {"optimizer", optimizer}});
  state.restore();
  auto shard = session.get_dataset_shard("train");
  for (auto epoch : session.epochs(run.epochs)) {
    for (auto& batch : shard.iter_torch_batches({.global_batch_size = run.batch, .shuffle = true})) {
      optimizer.zero_grad();
      at::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
      optimizer.step();
      const auto step = session.global_step();
      if (step == last && mine && how != nullptr) {
        if (std::string(how) == "kill") ::kill(::getpid(), SIGKILL);
        throw std::runtime_error("cut off");
      }
      if (step % run.report_every == 0) session.report({{"epoch", epoch}}, state);
    }
    session.report({{"epoch", epoch}}, state);
  }
  for (const auto& p : net->parameters()) weights.push_back(p.detach().clone());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 64;
  const Run run(std::strtoull(argv[1], nullptr, 10));
  argv[1] = argv[0];
  muster::Launch launch(argc - 1, argv + 1);
  return launch.run([&]() -> int {
    const auto x = numbers({run.samples, 3}, 11), y = numbers({run.samples, 1}, 5);
    std::vector<at::Tensor> weights;
    const auto result =
        muster::TorchTrainer(launch,
                             [&](muster::Session& session) {
                               if (run.adam)
                                 train<torch::optim::Adam>(session, run, torch::optim::AdamOptions(1e-2), weights);
                               else
                                 train<torch::optim::SGD>(session, run, torch::optim::SGDOptions(0.05).momentum(0.9),
                                                          weights);
                             },
                             {.datasets = {{"train", muster::Dataset::from_tensors({{"x", x}, {"y", y}})}}})
            .fit();
    if (result.error) return 1;
    if (launch.rank() == 0) {
      for (const auto& p : weights) std::printf("weights %.9f %.9f\n", p.sum().item<double>(), p.norm().item<double>());
    }
    return 0;
  });
}
