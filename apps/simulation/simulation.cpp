// A simulation that already uses MPI trains a model on half of its ranks while the other half computes. It simulates
// pendulums, and a network learns to predict their positions.
//
//   mpirun -n 4 simulation
//   mpirun -n 8 simulation --set rounds=200 --name long
#include <torch/torch.h>

#include <array>
#include <cmath>
#include <iostream>
#include <muster/mpi.hpp>
#include <muster/muster.hpp>
#include <random>
#include <vector>

namespace {

/// A sample: angle, velocity and damping of a pendulum, and its angle and velocity two seconds later.
constexpr int inputs = 3, outputs = 2, numbers = inputs + outputs;
constexpr int samples_per_round = 2048;

/// Sent by a trainer to its simulator after its last round, in place of the number of the next round.
constexpr int stop = -1;

/// Returns a pendulum's state after `seconds`, by the classical Runge-Kutta method of fourth order.
std::array<double, 2> swing(std::array<double, 2> state, double damping, double seconds) {
  constexpr int steps = 400;
  const double h = seconds / steps;
  const auto change = [&](const std::array<double, 2>& s) {
    return std::array{s[1], -9.81 * std::sin(s[0]) - damping * s[1]};
  };
  const auto along = [&](const std::array<double, 2>& slope, double time) {
    return std::array{state[0] + time * slope[0], state[1] + time * slope[1]};
  };
  for (int step = 0; step < steps; ++step) {
    const auto a = change(state), b = change(along(a, h / 2)), c = change(along(b, h / 2)), d = change(along(c, h));
    for (int i = 0; i < 2; ++i) state[i] += h / 6 * (a[i] + 2 * b[i] + 2 * c[i] + d[i]);
  }
  return state;
}

/// Returns the samples of a round for one of the trainers. They depend only on these two numbers.
std::vector<float> samples_of(int trainer, int round) {
  std::seed_seq seed{trainer, round};
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> angle(-2, 2), velocity(-2, 2), damping(0, 0.5);
  std::vector<float> samples;
  for (int i = 0; i < samples_per_round; ++i) {
    const double a = angle(random), v = velocity(random), d = damping(random);
    const auto later = swing({a, v}, d, 2);
    for (const double number : {a, v, d, later[0], later[1]}) samples.push_back(static_cast<float>(number));
  }
  return samples;
}

/// The simulating half: computes one round ahead as long as the trainer asks for rounds.
void simulate(int trainer) {
  int ahead = 0;
  for (auto samples = samples_of(trainer, ahead);; samples = samples_of(trainer, ++ahead)) {
    int round = stop;
    MPI_Recv(&round, 1, MPI_INT, trainer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (round == stop) return;
    // A run that resumes does not begin with round 0.
    if (round != ahead) samples = samples_of(trainer, ahead = round);
    MPI_Send(samples.data(), static_cast<int>(samples.size()), MPI_FLOAT, trainer, 0, MPI_COMM_WORLD);
  }
}

/// The training half: each rank trains on its simulator's samples while the simulator computes the next round.
void train(muster::Session& session, const muster::Config& config, int simulator) {
  using namespace torch::nn;
  auto net =
      session.prepare_model(Sequential(Linear(inputs, 128), Tanh(), Linear(128, 128), Tanh(), Linear(128, outputs)));
  torch::optim::Adam optimizer(net->parameters(), config.at("lr").get<double>());
  auto state = session.state({{"model", net}, {"optimizer", optimizer}});
  state.restore();

  for (const auto epoch : session.epochs(config.at("rounds"))) {
    const auto round = static_cast<int>(epoch);
    auto samples = torch::empty({samples_per_round, numbers});
    MPI_Send(&round, 1, MPI_INT, simulator, 0, MPI_COMM_WORLD);
    MPI_Recv(samples.mutable_data_ptr<float>(), samples.numel(), MPI_FLOAT, simulator, 0, MPI_COMM_WORLD,
             MPI_STATUS_IGNORE);

    // The network has not seen these samples, so the loss before each step is a test loss.
    muster::Mean loss;
    for (const auto& part : samples.split(64)) {
      optimizer.zero_grad();
      const auto l = torch::mse_loss(net->forward(part.narrow(1, 0, inputs)), part.narrow(1, inputs, outputs));
      l.backward();
      optimizer.step();
      loss.add(l, part.size(0));
    }
    session.report({{"loss", loss}}, state);
  }
}

}  // namespace

int main(int argc, char** argv) {
  // 1. MPI and all ranks belong to the simulation.
  int threads = 0, rank = 0, ranks = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &threads);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (ranks % 2 != 0) {
    if (rank == 0) std::cerr << "simulation: needs an even number of ranks, half of them to train\n";
    MPI_Finalize();
    return 64;
  }
  const bool trains = rank < ranks / 2;
  const int partner = trains ? rank + ranks / 2 : rank - ranks / 2;
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, trains ? 0 : 1, rank, &half);

  // 2. One half is a launch of muster and is used as in any program. The other half does not use muster.
  int code = 0;
  if (trains) {
    {
      muster::Launch launch(argc, argv, muster::from_mpi(half));
      code = launch.run([&] {
        return muster::TorchTrainer(
                   launch,
                   [&](muster::Session& session, const muster::Config& config) { train(session, config, partner); },
                   {
                       .train_loop_config = {{"rounds", 40}, {"lr", 2e-3}},
                       .run_config = {.checkpoint_config = {.num_to_keep = 1}},
                   })
            .fit();
      });
    }
    MPI_Send(&stop, 1, MPI_INT, partner, 0, MPI_COMM_WORLD);
  } else {
    simulate(partner);
  }

  // 3. The simulation finalises MPI.
  MPI_Comm_free(&half);
  MPI_Finalize();
  return code;
}
