// What live streams cost, as ratios to a floor that is measured in the same rounds. World rank 0 and the ranks after it
// are solvers, the last ones are the trainer.
//   mpirun -n 2 live_speed send             time in a send with room in the queue, over memcpy into touched memory
//   mpirun -n 2 live_speed stopped          a solver that drops samples beside a stopped trainer, over one without
//   muster mpirun -n 2 live_speed delivered        bytes/s of a stream, over MPI_Isend and MPI_Irecv; on two hosts
//   mpirun -n 2 live_speed stream M N       seconds for a sample of M MB from the solver to the trainer, of N samples
//   mpirun -n 2 live_speed memory S T       growth of resident memory with these rules of solver (0 to 2) and trainer
//   (0 to 3) mpirun -n 2 live_speed trainer          samples/s of a training that draws from a stream, over one from
//   memory mpirun -n 18 live_speed files           16 solvers and 2 trainer ranks: a stream, over HDF5 files that are
//   written and read
// Prints the median of a ratio with its 95% interval, and the ratio of the floor to itself (A/A).
#include "../apps/muster/bench/statistics.hpp"
#include "data/sources/source.hpp"
#include "muster/launch.hpp"
#include "muster/live.hpp"
#include "muster/mpi.hpp"
#include "muster/trainer.hpp"
#include "muster_live.h"

#include <hdf5.h>
#include <mpi.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace muster::soak {
namespace {

constexpr int rounds = 31;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double seconds(const std::function<void()>& action) {
  const auto begin = now();
  action();
  return now() - begin;
}

/// A ratio to a floor, which each round measures before and after.
class Ratio {
 public:
  /// Adds a ratio of times.
  void add(double time, double before, double after) {
    ratios_.push_back(time / ((before + after) / 2));
    floors_.push_back(before / after);
    times_.push_back((before + after) / 2);
  }
  /// Adds a ratio of speeds.
  void add_speed(double time, double before, double after) {
    add(time, before, after);
    ratios_.back() = 1 / ratios_.back();
  }
  void print(const std::string& what, const std::string& bound) const {
    const auto interval = bench::bootstrap_interval(ratios_);
    std::printf("%-44s %.3f (%.3f to %.3f), %s; A/A %.3f, %zu rounds of %.3g ms\n", what.c_str(),
                bench::median(ratios_), interval.low, interval.high, bound.c_str(), bench::median(floors_),
                floors_.size(), 1e3 * bench::median(times_));
    std::fflush(stdout);
  }

 private:
  std::vector<double> ratios_, floors_, times_;
};

void tell(int rank, std::int64_t value = 0) { MPI_Send(&value, 1, MPI_INT64_T, rank, 7, MPI_COMM_WORLD); }
std::int64_t hear(int rank) {
  std::int64_t value = 0;
  MPI_Recv(&value, 1, MPI_INT64_T, rank, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  return value;
}

/// One side of the program. The trainer's first world rank is `solvers`.
struct Side {
  MPI_Comm part = MPI_COMM_NULL;
  int solvers = 1;
  Launch* launch = nullptr;  ///< of the trainer
};

/// A stream of one field of bytes, from this rank alone. `queue`: bytes, 0 for the default.
LiveSender open_stream(const std::string& name, std::int64_t bytes, std::int64_t queue, int rule = MUSTER_LIVE_WAIT,
                       int solver = 0) {
  LiveSender live(MPI_COMM_SELF, name.c_str(), {.solver = solver, .bytes = queue, .rule = rule, .timeout_s = 0});
  live.field("x", MUSTER_LIVE_UINT8, {bytes}, {0}, {bytes});
  return live;
}

/// Draws single samples to the end, and calls each(number of samples so far) after each of them.
void draw_all(const Live& live, const std::function<void(std::int64_t)>& each) {
  const auto source = detail::data::source_of(live.dataset());
  for (std::int64_t drawn = 0; source->draw(1, 0, [] {});) each(++drawn);
}

// --- send ----------------------------------------------------------------------------------------------------------

constexpr int blocks = 4;

void solve_send(std::int64_t megabytes) {
  const auto bytes = megabytes << 20;
  const std::vector<char> block(static_cast<std::size_t>(bytes), 1);
  std::vector<std::vector<char>> touched(blocks, block);
  auto live = open_stream("send" + std::to_string(megabytes), bytes, blocks * bytes + (1 << 20));
  std::int64_t number = 0;
  const auto copy = [&] {
    double sum = 0;
    for (auto& into : touched) sum += seconds([&] { std::memcpy(into.data(), block.data(), block.size()); });
    return sum;
  };
  const auto send = [&] {
    double sum = 0;
    for (int i = 0; i < blocks; ++i) {
      sum += seconds([&] { live.send(number++, {block.data()}); });
      hear(1);
    }
    return sum;
  };
  send(), copy();
  Ratio ratio;
  for (int round = 0; round < rounds; ++round) {
    const auto first = copy(), sent = send();
    ratio.add(sent, first, copy());
  }
  ratio.print("send of " + std::to_string(megabytes) + " MB over memcpy", "at most 1.1");
}

void train_send(const Side& side, std::int64_t megabytes) {
  // The trainer's core computes, as in a training: to wake an idle one takes a virtual machine 0.1 ms.
  const std::jthread computing([](const std::stop_token& stop) {
    std::vector<double> u(1 << 14, 1);
    while (!stop.stop_requested())
      for (auto& x : u) x = 0.5 * (x + 1);
  });
  const Live live(*side.launch, "send" + std::to_string(megabytes),
                  {.rule = LiveRule::fifo, .bytes = 8 * (megabytes << 20)});
  draw_all(live, [](std::int64_t) { tell(0); });
}

// --- stopped -------------------------------------------------------------------------------------------------------

/// A few sweeps of a stencil, some milliseconds.
void compute(std::vector<double>& u) {
  constexpr std::size_t n = 512;
  for (int sweep = 0; sweep < 8; ++sweep)
    for (std::size_t i = n; i + n < u.size(); ++i) u[i] = 0.25 * (u[i - 1] + u[i + 1] + u[i - n] + u[i + n]);
}

void solve_stopped() {
  std::vector<double> u(512 * 512, 1);
  const auto bytes = static_cast<std::int64_t>(u.size() * sizeof(double));
  auto live = open_stream("stopped", bytes, 4 * bytes, MUSTER_LIVE_DROP_NEWEST);
  const auto trainer = static_cast<pid_t>(hear(1));
  std::int64_t number = 0;
  live.send(number++, {u.data()});
  hear(1);
  while (live.send(number++, {u.data()}) != MUSTER_LIVE_DROPPED) ::usleep(1000);
  constexpr int steps = 20;
  const auto plain = [&] {
    return seconds([&] {
      for (int i = 0; i < steps; ++i) compute(u);
    });
  };
  Ratio ratio;
  std::int64_t taken = 0;
  for (int round = 0; round < rounds; ++round) {
    const auto first = plain(), sent = seconds([&] {
                                  for (int i = 0; i < steps; ++i) {
                                    compute(u);
                                    taken += live.send(number++, {u.data()}) != MUSTER_LIVE_DROPPED;
                                  }
                                });
    ratio.add(sent, first, plain());
  }
  ::kill(trainer, SIGCONT);
  ratio.print("solver beside a stopped trainer, 2 MB a step", "at most 1.03");
  if (taken > 0) std::printf("%lld samples were taken: the trainer was not stopped\n", static_cast<long long>(taken));
}

void train_stopped(const Side& side) {
  const Live live(*side.launch, "stopped", {.rule = LiveRule::fifo, .bytes = 8 << 20});
  tell(0, ::getpid());
  live.ledger();  // waits for the first sample
  tell(0);
  ::raise(SIGSTOP);
  draw_all(live, [](std::int64_t) {});
}

// --- delivered -----------------------------------------------------------------------------------------------------

constexpr int pieces = 64, under_way = 8;
constexpr std::int64_t piece_bytes = 4 << 20;

void solve_delivered() {
  const std::vector<char> block(piece_bytes, 1);
  auto live = open_stream("delivered", piece_bytes, under_way * piece_bytes + (1 << 20));
  std::int64_t number = 0;
  const auto send_plainly = [&] {
    std::array<MPI_Request, under_way> requests;
    requests.fill(MPI_REQUEST_NULL);
    for (int i = 0; i < pieces; ++i) {
      auto& request = requests[static_cast<std::size_t>(i % under_way)];
      MPI_Wait(&request, MPI_STATUS_IGNORE);
      MPI_Isend(block.data(), static_cast<int>(piece_bytes), MPI_BYTE, 1, 8, MPI_COMM_WORLD, &request);
    }
    MPI_Waitall(under_way, requests.data(), MPI_STATUSES_IGNORE);
  };
  for (int round = 0; round <= rounds; ++round) {
    hear(1), send_plainly();
    hear(1);
    for (int i = 0; i < pieces; ++i) live.send(number++, {block.data()});
    for (int has_heard = 0; has_heard == 0; MPI_Iprobe(1, MPI_ANY_TAG, MPI_COMM_WORLD, &has_heard, MPI_STATUS_IGNORE))
      live.progress();
    hear(1), send_plainly();
  }
}

void train_delivered(const Side& side) {
  const Live live(*side.launch, "delivered", {.rule = LiveRule::fifo, .bytes = 2 * under_way * piece_bytes});
  std::vector<std::vector<char>> into(under_way, std::vector<char>(piece_bytes));
  const auto receive_plainly = [&] {
    tell(0);
    return seconds([&] {
      std::array<MPI_Request, under_way> requests;
      requests.fill(MPI_REQUEST_NULL);
      for (int i = 0; i < pieces; ++i) {
        const auto at = static_cast<std::size_t>(i % under_way);
        MPI_Wait(&requests[at], MPI_STATUS_IGNORE);
        MPI_Irecv(into[at].data(), static_cast<int>(piece_bytes), MPI_BYTE, 0, 8, MPI_COMM_WORLD, &requests[at]);
      }
      MPI_Waitall(under_way, requests.data(), MPI_STATUSES_IGNORE);
    });
  };
  Ratio ratio;
  double first = 0, begin = 0;
  const auto start = [&] {
    first = receive_plainly();
    tell(0);
    begin = now();
  };
  start();
  int round = 0;
  draw_all(live, [&](std::int64_t drawn) {
    if (drawn % pieces != 0) return;
    const auto taken = now() - begin;
    const auto last = receive_plainly();
    if (round > 0) ratio.add_speed(taken, first, last);
    if (round++ < rounds) start();
  });
  ratio.print("bytes/s of a stream over MPI_Isend/Irecv", "at least 0.9");
}

// --- stream --------------------------------------------------------------------------------------------------------

void solve_stream(std::int64_t megabytes, int count) {
  const std::vector<char> block(static_cast<std::size_t>(megabytes << 20), 1);
  auto live = open_stream("stream", megabytes << 20, (4 * megabytes + 1) << 20);
  for (int i = 0; i < count; ++i) live.send(i, {block.data()});
}

void train_stream(const Side& side, std::int64_t megabytes, int count) {
  const Live live(*side.launch, "stream", {.rule = LiveRule::fifo, .bytes = 8 * megabytes << 20});
  double begin = 0;
  draw_all(live, [&](std::int64_t drawn) {
    if (drawn == count / 2) begin = now();
  });
  std::printf("%.6f s for a sample\n", (now() - begin) / (count - count / 2));
}

// --- memory --------------------------------------------------------------------------------------------------------

/// A line of /proc/self/status, in bytes.
double status_of(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;)
    if (word == key + ":") {
      double kilobytes = 0;
      file >> kilobytes;
      return kilobytes * 1024;
    }
  return 0;
}

/// The growth of resident memory up to its peak while `action` runs.
void print_growth(const std::string& what, double limit, const std::function<void()>& action) {
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak begins anew
  const auto before = status_of("VmRSS");
  action();
  const auto growth = status_of("VmHWM") - before;
  std::printf("%-44s %.1f MB, limit %.1f MB, %s\n", what.c_str(), growth / 1e6, limit / 1e6,
              growth <= 1.02 * limit + 8e6 ? "within 2% + 8 MB" : "BEYOND 2% + 8 MB");
  std::fflush(stdout);
}

constexpr std::int64_t sample_bytes = 2 << 20, queue_bytes = 64 << 20, reservoir_bytes = 256 << 20;

void solve_memory(int rule) {
  const std::vector<char> block(sample_bytes, 1);
  print_growth("solver, rule " + std::to_string(rule), queue_bytes, [&] {
    auto live = open_stream("memory", sample_bytes, queue_bytes, rule);
    for (int i = 0; i < 600; ++i) live.send(i, {block.data()});
    live.close();
  });
}

void train_memory(const Side& side, int rule) {
  print_growth("trainer, rule " + std::to_string(rule) + ", with the solver's queue", reservoir_bytes + queue_bytes,
               [&] {
                 const Live live(*side.launch, "memory",
                                 {.rule = static_cast<LiveRule>(rule), .bytes = reservoir_bytes, .after_end = 64});
                 draw_all(live, [](std::int64_t) {});
               });
}

// --- trainer -------------------------------------------------------------------------------------------------------

constexpr std::int64_t features = 4096, in_memory = 2048, draws = 512, batch = 32;

void solve_trainer() {
  const std::vector<char> block(features * sizeof(float), 0);
  auto live = open_stream("train", features * static_cast<std::int64_t>(sizeof(float)), 0);
  std::int64_t number = 0;
  // The trainer asks for so many samples; none: the end.
  for (auto wanted = hear(1); wanted > 0; wanted = hear(1))
    for (; wanted > 0; --wanted) live.send(number++, {block.data()});
}

void train_trainer(const Side& side) {
  Live live(*side.launch, "train",
            {.rule = LiveRule::reservoir,
             .bytes = static_cast<std::int64_t>(in_memory * features * sizeof(float)),
             .samples_per_epoch = draws});
  tell(0, in_memory);
  const auto train = [&](Session& session) {
    using namespace torch::nn;
    auto net = session.prepare_model(Sequential(Linear(features, 64), ReLU(), Linear(64, features)));
    torch::optim::SGD optimizer(net->parameters(), 1e-3);
    auto state = session.state({{"model", net}});
    bool arrives = false;
    // Seconds for each sample.
    const auto pass = [&](const char* name) {
      std::int64_t samples = 0;
      const auto taken = seconds([&] {
        for (auto& rows : session.get_dataset_shard(name).iter_torch_batches({.batch_size = batch})) {
          if (arrives) tell(0, rows.size());
          samples += rows.size();
          optimizer.zero_grad();
          const auto x = rows["x"].view({-1, features, sizeof(float)}).select(2, 0).to(torch::kFloat);
          torch::mse_loss(net->forward(x), x).backward();
          optimizer.step();
        }
      });
      return taken / static_cast<double>(samples);
    };
    pass("live");  // the first draw has the trainer take samples
    for (auto now = live.ledger(); now.in_memory < now.room; now = live.ledger()) ::usleep(1000);
    pass("memory");
    for (const bool now_arrives : {false, true}) {
      Ratio ratio;
      for (int round = 0; round < rounds; ++round) {
        arrives = false;
        const auto first = pass("memory");
        arrives = now_arrives;
        const auto drawn = pass("live");
        arrives = false;
        const auto last = pass("memory");
        ratio.add_speed(drawn, first, last);
      }
      ratio.print(
          now_arrives ? "samples/s while they arrive, over memory" : "samples/s of a full reservoir, over memory",
          now_arrives ? "at least 0.85" : "at least 0.95");
    }
    tell(0, 0);
    session.report({{"done", 1}}, state);
  };
  const auto values = torch::zeros({in_memory, static_cast<std::int64_t>(features * sizeof(float))}, torch::kByte);
  TorchTrainer(
      *side.launch, train,
      {.run_config = {.name = "live_speed", .storage_path = std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp"},
       .datasets = {{"live", live.dataset()}, {"memory", Dataset::from_tensors({{"x", values}})}}})
      .fit();
}

// --- files ---------------------------------------------------------------------------------------------------------

constexpr std::int64_t of_solver = 32, megabyte = 1 << 20;
constexpr int file_rounds = 7;

std::string file_of(int solver) {
  return std::filesystem::temp_directory_path() / ("live_speed." + std::to_string(solver));
}

void write_file(int solver, const std::vector<char>& block) {
  const hsize_t all[] = {of_solver, megabyte}, one[] = {1, megabyte};
  const auto file = H5Fcreate(file_of(solver).c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
  const auto space = H5Screate_simple(2, all, nullptr), memory = H5Screate_simple(2, one, nullptr);
  const auto dataset = H5Dcreate2(file, "x", H5T_NATIVE_UINT8, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  for (hsize_t i = 0; i < of_solver; ++i) {
    const hsize_t begin[] = {i, 0};
    H5Sselect_hyperslab(space, H5S_SELECT_SET, begin, nullptr, one, nullptr);
    H5Dwrite(dataset, H5T_NATIVE_UINT8, memory, space, H5P_DEFAULT, block.data());
  }
  H5Dclose(dataset), H5Sclose(memory), H5Sclose(space), H5Fclose(file);
}

void solve_files(int solver) {
  const std::vector<char> block(megabyte, 1);
  for (int round = 0; round < file_rounds; ++round) {
    for (int time = 0; time < 2; ++time) {
      MPI_Barrier(MPI_COMM_WORLD);
      write_file(solver, block);
      MPI_Barrier(MPI_COMM_WORLD);
      if (time == 1) break;
      MPI_Barrier(MPI_COMM_WORLD);
      auto live = open_stream("files" + std::to_string(round), megabyte, 4 * megabyte, MUSTER_LIVE_WAIT, solver);
      for (std::int64_t i = 0; i < of_solver; ++i) live.send(i, {block.data()});
      live.close();
    }
  }
  MPI_Barrier(MPI_COMM_WORLD);
  std::filesystem::remove(file_of(solver));
}

void train_files(const Side& side) {
  const auto ranks = side.launch->communicator();
  const auto from_files = [&] {
    MPI_Barrier(MPI_COMM_WORLD);
    const auto begin = now();
    MPI_Barrier(MPI_COMM_WORLD);
    std::vector<std::string> files;
    for (int solver = 0; solver < side.solvers; ++solver) files.push_back(file_of(solver));
    const auto dataset = Dataset::from_hdf5(files);
    for (std::int64_t i = ranks.rank(); i < of_solver * side.solvers; i += ranks.size()) dataset.read(std::array{i});
    return now() - begin;
  };
  Ratio ratio;
  for (int round = 0; round < file_rounds; ++round) {
    const auto first = from_files();
    MPI_Barrier(MPI_COMM_WORLD);
    const auto begin = now();
    {
      const Live live(*side.launch, "files" + std::to_string(round),
                      {.rule = LiveRule::fifo, .bytes = 64 * megabyte, .solvers = side.solvers});
      draw_all(live, [](std::int64_t) {});
    }
    const auto live_s = now() - begin;
    ratio.add(live_s, first, from_files());
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (ranks.rank() == 0) ratio.print("16 solvers to 2 ranks, over HDF5 files", "below 1");
}

}  // namespace
}  // namespace muster::soak

int main(int argc, char** argv) {
  using namespace muster;
  using namespace muster::soak;
  int threads = 0, rank = 0, size = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &threads);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const std::string what = argc > 1 ? argv[1] : "send";
  const auto number = [&](int at) { return argc > at ? std::atoi(argv[at]) : 0; };
  Side side{.solvers = what == "files" ? size - 2 : 1};
  const bool solves = rank < side.solvers;
  MPI_Comm_split(MPI_COMM_WORLD, solves ? 0 : 1, rank, &side.part);
  muster_live_world(nullptr);
  int code = 0;
  if (solves) {
    if (what == "send")
      for (const int megabytes : {1, 4, 16, 64}) solve_send(megabytes);
    else if (what == "stopped")
      solve_stopped();
    else if (what == "delivered")
      solve_delivered();
    else if (what == "stream")
      solve_stream(number(2), number(3));
    else if (what == "memory")
      solve_memory(number(2));
    else if (what == "trainer")
      solve_trainer();
    else
      solve_files(rank);
  } else {
    std::string program = "live_speed";
    std::array<char*, 2> arguments{program.data(), nullptr};
    Launch launch(1, arguments.data(), from_mpi(side.part));
    side.launch = &launch;
    code = launch.run([&] {
      if (what == "send")
        for (const int megabytes : {1, 4, 16, 64}) train_send(side, megabytes);
      else if (what == "stopped")
        train_stopped(side);
      else if (what == "delivered")
        train_delivered(side);
      else if (what == "stream")
        train_stream(side, number(2), number(3));
      else if (what == "memory")
        train_memory(side, number(3));
      else if (what == "trainer")
        train_trainer(side);
      else
        train_files(side);
    });
  }
  MPI_Comm_free(&side.part);
  MPI_Finalize();
  return code;
}
