// The loop of before.cpp with gradients averaged by muster: no launch, no session, no run folder.
//
//   mpirun -n 2 libtorch_mpi_own_loop FOLDER
#include <torch/torch.h>
#include <muster/data_parallel.hpp>
#include <muster/mpi.hpp>

#include <iostream>
#include <string>
#include <vector>

#include <mpi.h>

constexpr int epochs = 20, batch_size = 32;

void train(const muster::Communicator& ranks, const std::string& folder) {
  torch::nn::Sequential net(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  muster::DataParallel parallel(ranks, net);
  auto optimizer = parallel.prepare_optimizer(torch::optim::Adam(net->parameters(), 0.01));

  // Continue where an earlier job stopped.
  std::int64_t epoch = 0;
  const muster::StateEntries state{{"model", net}, {"optimizer", optimizer}, {"epoch", epoch}};
  parallel.load(folder, state);

  const auto x = torch::linspace(-3, 3, 1001).unsqueeze(1);
  const auto y = torch::sin(x);
  while (epoch < epochs) {
    // This rank's share of the samples. All ranks use the same random order; the sampler repeats some samples to make
    // all shares equal.
    torch::data::samplers::DistributedRandomSampler sampler(x.size(0), ranks.size(), ranks.rank());
    sampler.set_epoch(epoch);
    sampler.reset();
    double sum = 0, samples = 0;
    while (const auto indices = sampler.next(batch_size)) {
      const auto chosen = torch::tensor(std::vector<std::int64_t>(indices->begin(), indices->end()));
      optimizer.zero_grad();
      const auto loss = torch::mse_loss(net->forward(x.index_select(0, chosen)), y.index_select(0, chosen));
      loss.backward();
      optimizer.step();
      sum += loss.item<double>() * static_cast<double>(indices->size());
      samples += static_cast<double>(indices->size());
    }
    const double loss = ranks.all_reduce(sum) / ranks.all_reduce(samples);
    if (ranks.rank() == 0) std::cout << "epoch " << epoch << ", loss " << loss << std::endl;
    ++epoch;
    parallel.save(folder, state);
  }
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  train(muster::from_mpi(MPI_COMM_WORLD), argc > 1 ? argv[1] : "sine");
  MPI_Finalize();
}
