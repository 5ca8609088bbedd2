// One program that splits its communicator: the lower half of the ranks trains, the other half solves. It goes on until
// it is killed, and ends when it has been started again. Each sample has its own number as its value.
#include "muster/live.hpp"
#include "muster/mpi.hpp"
#include "muster/muster.hpp"
#include "muster_live.h"

#include <mpi.h>
#include <torch/torch.h>

namespace {

void solve(MPI_Comm solvers) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(solvers, &rank);
  MPI_Comm_size(solvers, &ranks);
  muster::LiveSender live(solvers, "numbers");
  live.field("x", MUSTER_LIVE_FLOAT32, {ranks}, {rank}, {1});
  int code = MUSTER_LIVE_OK;
  for (auto number = live.next(); code <= MUSTER_LIVE_DROPPED; ++number) {
    const auto x = static_cast<float>(number);
    code = live.send(number, {&x});
  }
}

void train(muster::Session& session, muster::Live& live) {
  auto net = session.prepare_model(torch::nn::Linear(1, 1));
  torch::optim::SGD optimizer(net->parameters(), 0);
  auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"live", live}});
  const bool resumed = state.restore();
  for ([[maybe_unused]] const auto epoch : session.epochs(1'000'000)) {
    muster::Mean loss;
    for (auto& batch : session.get_dataset_shard("train").iter_torch_batches({.batch_size = 8})) {
      optimizer.zero_grad();
      const auto l = net->forward(batch["x"].narrow(1, 0, 1)).square().mean();
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
    }
    session.report({{"loss", loss}}, state);
    if (resumed) break;
  }
  live.stop_solvers();
}

}  // namespace

int main(int argc, char** argv) {
  int threads = 0, rank = 0, ranks = 0, code = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &threads);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const bool trains = rank < ranks / 2;
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, trains ? 0 : 1, rank, &half);
  if (trains) {
    muster::Launch launch(argc, argv, muster::from_mpi(half));
    code = launch.run([&] {
      muster::Live live(launch, "numbers", {.bytes = 1 << 16, .watermark = 16, .samples_per_epoch = 64});
      return muster::TorchTrainer(
                 launch, [&](muster::Session& session) { train(session, live); },
                 {.run_config = {.checkpoint_config = {.num_to_keep = 1}}, .datasets = {{"train", live.dataset()}}})
          .fit();
    });
  } else {
    solve(half);
  }
  MPI_Comm_free(&half);
  MPI_Finalize();
  return code;
}
