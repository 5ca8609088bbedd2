// mpirun -n 2 ddp_peer LOSSES.txt
//
// Trains the model of ddp_peer.py on the same weights and batches, with gradients averaged by muster, and writes the
// loss of each step, the mean over the ranks, one per line.
#include "comm/mpi_scope.hpp"
#include "gradients/prepared_model.hpp"
#include "muster/process_group.hpp"

#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <fstream>
#include <iomanip>
#include <memory>

namespace {

namespace nn = torch::nn;
constexpr int steps = 50, batch = 16, classes = 10;

/// As in ddp_peer.py.
at::Tensor wave(at::IntArrayRef sizes, double scale, double frequency, double phase) {
  const auto count = at::empty(sizes).numel();
  return (scale * at::sin(frequency * at::arange(count, at::kDouble) + phase)).to(at::kFloat).view(sizes);
}

}  // namespace

int main(int argc, char** argv) {
  const muster::detail::comm::MpiScope environment;
  const auto& world = environment.world();
  if (argc != 2) return 64;

  auto net = std::make_shared<nn::SequentialImpl>(nn::Conv2d(1, 4, 3), nn::ReLU(), nn::Flatten(), nn::Linear(144, 32),
                                                  nn::Tanh(), nn::Linear(32, classes));
  {
    const at::NoGradGuard no_grad;
    double phase = world.rank();  // so that the weights of rank 0 must travel
    for (auto& p : net->parameters()) p.copy_(wave(p.sizes(), 0.3, 0.91, phase += 1));
  }
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto prepared =
      muster::detail::gradients::PreparedModel::prepare(net,
                                                        {.communicator = world,
                                                         .new_group = [&] { return muster::make_process_group(world); },
                                                         .steps = std::make_shared<muster::detail::step::Steps>(),
                                                         .no_sync_depth = std::make_shared<int>(0)},
                                                        {.bucket_bytes = 4096, .first_bucket_bytes = 512});

  std::ofstream losses;
  if (world.rank() == 0) losses.open(argv[1]);
  for (int step = 0; step < steps; ++step) {
    const int seed = step * world.size() + world.rank();
    const auto x = wave({batch, 1, 8, 8}, 1, 0.37, seed);
    const auto y = (at::arange(batch, at::kLong) * 7 + seed) % classes;
    optimizer.zero_grad();
    auto loss = nn::functional::cross_entropy(net->forward(x), y);
    loss.backward();
    optimizer.step();
    const double mean = world.all_reduce(loss.item<double>()) / world.size();
    losses << std::setprecision(17) << mean << '\n';
  }
}
