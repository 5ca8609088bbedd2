// Plain libtorch on every rank; gradients are averaged by MPI.
//
//   mpirun -n 2 libtorch_mpi_before CHECKPOINT
#include <torch/torch.h>

#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include <mpi.h>

constexpr int epochs = 20, batch_size = 32;

/// Replaces the tensor by its mean over the ranks.
void average(torch::Tensor tensor, int ranks) {
  MPI_Allreduce(MPI_IN_PLACE, tensor.data_ptr(), static_cast<int>(tensor.numel()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  tensor.div_(ranks);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const std::string checkpoint = argc > 1 ? argv[1] : "checkpoint.pt";

  // All ranks start with the same weights.
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  torch::optim::Adam optimizer(net->parameters(), 0.01);

  // Resume where an earlier job has stopped.
  std::int64_t epoch = 0;
  if (std::filesystem::exists(checkpoint)) {
    torch::serialize::InputArchive archive, model, state;
    archive.load_from(checkpoint);
    torch::Tensor next;
    archive.read("epoch", next);
    epoch = next.item<std::int64_t>();
    archive.read("model", model);
    net->load(model);
    archive.read("optimizer", state);
    optimizer.load(state);
  }

  const auto x = torch::linspace(-3, 3, 1001).unsqueeze(1);
  const auto y = torch::sin(x);
  for (; epoch < epochs; ++epoch) {
    // This rank's part of the samples. All ranks use the same random order; the sampler repeats some samples to make
    // all parts equal.
    torch::data::samplers::DistributedRandomSampler sampler(x.size(0), ranks, rank, /*allow_duplicates=*/true);
    sampler.set_epoch(epoch);
    sampler.reset();
    auto sum = torch::zeros({2});
    while (const auto indices = sampler.next(batch_size)) {
      const auto chosen = torch::tensor(std::vector<std::int64_t>(indices->begin(), indices->end()));
      optimizer.zero_grad();
      const auto loss = torch::mse_loss(net->forward(x.index_select(0, chosen)), y.index_select(0, chosen));
      loss.backward();
      for (auto& parameter : net->parameters()) average(parameter.grad(), ranks);
      optimizer.step();
      const auto samples = static_cast<double>(indices->size());
      sum += torch::tensor({loss.item<double>() * samples, samples});
    }
    average(sum, ranks);

    if (rank == 0) {
      std::cout << "epoch " << epoch << ", loss " << (sum[0] / sum[1]).item<double>() << std::endl;
      // Write a new file, which then replaces the old one.
      torch::serialize::OutputArchive archive, model, state;
      archive.write("epoch", torch::tensor(epoch + 1));
      net->save(model);
      archive.write("model", model);
      optimizer.save(state);
      archive.write("optimizer", state);
      archive.save_to(checkpoint + ".new");
      std::filesystem::rename(checkpoint + ".new", checkpoint);
    }
  }
  MPI_Finalize();
}
