// Kills a solver or the trainer of a coupling at a random moment. The other side goes on or ends as it should, and its
// ledger adds up. Each survivor writes "ok", or what is wrong, and how many survivors there are, into FOLDER/RANK.
//
//   mpirun --enable-recovery -n RANKS live_kills SEED FOLDER
#include "base/file.hpp"
#include "data/sources/source.hpp"
#include "muster/launch.hpp"
#include "muster/live.hpp"
#include "muster/mpi.hpp"
#include "muster_live.h"
#include "soak/dice.hpp"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <mpi.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace muster::soak {
namespace {

constexpr std::int64_t samples = 150, values = 128;

struct Plan {
  int trainers = 1, victim = -1;  // a solver; -1: the trainer
  std::vector<int> solver_ranks;
  std::array<int, 2> rules{};  // of the solvers
  LiveOptions options;
  int kill_after_us = 0;
  bool by_file = false;  // the solvers find the trainer as those of other jobs do
};

Plan plan_of(std::uint64_t seed, int size) {
  Dice dice(seed);
  Plan plan;
  plan.trainers = dice.between(1, std::min(2, size - 1));
  const int left = size - plan.trainers;
  plan.solver_ranks = {left};
  if (left > 1 && dice.chance(0.6)) plan.solver_ranks = {left - left / 2, left / 2};
  for (auto& rule : plan.rules) rule = dice.below(3);
  plan.victim = dice.chance(0.4) ? -1 : dice.below(static_cast<int>(plan.solver_ranks.size()));
  plan.kill_after_us = dice.below(dice.one_of({2'000, 30'000, 150'000}));
  plan.options.rule = dice.one_of({LiveRule::fifo, LiveRule::firo, LiveRule::reservoir});
  plan.options.bytes = 64 * 1024;
  plan.options.solvers = static_cast<int>(plan.solver_ranks.size());
  plan.options.on_solver_death = dice.chance(0.3) ? LiveFault::end : LiveFault::go_on;
  plan.options.timeout = std::chrono::seconds(10);
  plan.options.seed = seed;
  plan.by_file = dice.chance(0.4);
  // A dead solver might come back, and without a limit the trainer draws from its full reservoir meanwhile.
  if (plan.by_file && plan.options.rule == LiveRule::reservoir) plan.options.max_uses = 3;
  return plan;
}

/// What rank 0 of each solver has done, in a file that a killed process leaves.
struct Done {
  std::int64_t begun = 0, sent = 0;
};
Done* done_of_solvers(const std::string& folder) {
  const int file = ::open((folder + "/done").c_str(), O_RDWR | O_CREAT, 0600);
  const auto sized = ::ftruncate(file, 4096);
  void* const memory = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (sized != 0 || memory == MAP_FAILED) std::abort();
  return static_cast<Done*>(memory);
}

std::int64_t open_files() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

std::string solve(const Plan& plan, int solver, MPI_Comm comm, bool trainer_dies, Dice dice, Done& done) {
  int rank = 0, ranks = 0;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &ranks);
  const auto files = open_files();
  muster_live* live = nullptr;
  const muster_live_options options{
      .solver = solver, .bytes = 1 << 12, .rule = plan.rules[static_cast<std::size_t>(solver)], .timeout_s = 10};
  const auto& file = plan.options.connect_file;
  int code = plan.by_file ? muster_live_connect(comm, file.c_str(), "kills", &options, &live)
                          : muster_live_open(comm, "kills", &options, &live);
  const std::int64_t offset = values * rank / ranks, local = values * (rank + 1) / ranks - offset;
  muster_live_field(live, "x", MUSTER_LIVE_INT64, 1, &values, &offset, &local);
  for (std::int64_t number = 0; code < MUSTER_LIVE_STOP && (trainer_dies || number < samples); ++number) {
    const std::vector<std::int64_t> x(static_cast<std::size_t>(local), number);
    const std::array<const void*, 1> arrays{x.data()};
    if (rank == 0) done.begun = number + 1;
    code = muster_live_send(live, number, arrays.data());
    if (rank == 0 && code < MUSTER_LIVE_STOP) done.sent = number + 1;
    if (number > 1'000'000) return "it goes on without a trainer";
    ::usleep(static_cast<unsigned>(dice.below(600)));
  }
  const bool may_end = trainer_dies || plan.options.on_solver_death == LiveFault::end;
  if (code > MUSTER_LIVE_STOP && (code != MUSTER_LIVE_NO_TRAINER || !may_end)) return muster_live_text(live);
  muster_live_close(&live, nullptr);
  if (trainer_dies && code != MUSTER_LIVE_NO_TRAINER) return "nobody has told it that the trainer has died";
  return files == open_files() ? "" : "it has left open files";
}

std::string train(const Plan& plan, const Launch& launch, bool solver_dies, Dice dice, const Done* done) {
  std::set<std::array<std::int64_t, 2>> used;
  const auto files = open_files();
  {
    const Live live(launch, "kills", plan.options);
    const auto allowed = [&](const Error& error) {
      const std::string text = error.what();
      // In another job it might come back.
      const bool never_came =
          solver_dies && (plan.by_file || (done[plan.victim].begun == 0 && plan.options.solvers > 1));
      if (never_came && text.find("no sample has come") != std::string::npos) return true;
      return solver_dies && (text.find("all have ended without a sample") != std::string::npos ||
                             text.find("none has sent a sample") != std::string::npos ||  // it died before it opened
                             ((plan.options.on_solver_death == LiveFault::end || plan.options.solvers == 1) &&
                              text.find(" ended without muster_live_close()") != std::string::npos));
    };
    bool ended_early = false;
    try {
      const auto source = detail::data::source_of(live.dataset());
      while (auto drawn = source->draw(dice.between(1, 4), 0, [] {})) {
        const auto& batch = drawn->batch;
        for (std::int64_t row = 0; row < batch.size(); ++row) {
          const auto solver = batch["sample"][row][0].item<std::int64_t>(),
                     number = batch["sample"][row][1].item<std::int64_t>();
          if (!batch["x"][row].eq(number).all().item<bool>()) return "a sample has wrong values";
          used.insert({solver, number});
        }
      }
    } catch (const Error& error) {
      if (!allowed(error)) return error.what();
      if (std::string(error.what()).find("waiting for a solver") != std::string::npos) return "";
      ended_early = true;
    }
    const auto ledger = live.ledger();
    const auto all_used = launch.communicator().all_reduce(static_cast<std::int64_t>(used.size()));
    const auto text = "sent " + std::to_string(ledger.sent) + " on its way " + std::to_string(ledger.on_its_way) +
                      " waiting " + std::to_string(ledger.waiting) + " used " + std::to_string(ledger.used) +
                      " dropped " + std::to_string(ledger.dropped_by_solver) + " lost " + std::to_string(ledger.lost) +
                      "; drawn " + std::to_string(all_used);
    std::int64_t least = 0, most = 0;
    for (std::size_t solver = 0; solver < plan.solver_ranks.size(); ++solver)
      least += done[solver].sent, most += done[solver].begun;
    if (ledger.used != all_used) return "the ledger differs from what was drawn: " + text;
    if (ended_early) return ledger.lost < 0 || ledger.on_its_way < 0 ? "the ledger does not add up: " + text : "";
    if (ledger.sent < least || ledger.sent > most)
      return "the solvers have sent " + std::to_string(least) + " to " + std::to_string(most) + ": " + text;
    if (ledger.on_its_way != 0 || ledger.waiting != 0 || ledger.lost < 0 || ledger.dropped_by_trainer != 0)
      return "the ledger does not add up: " + text;
    // No more than what a solver has memory for, and the sample at hand.
    if (ledger.lost > (solver_dies ? (1 << 12) / (values * 8 / 4) + 1 : 0)) return "too many are lost: " + text;
  }
  return files == open_files() ? "" : "it has left open files";
}

}  // namespace
}  // namespace muster::soak

int main(int argc, char** argv) {
  using namespace muster;
  using namespace muster::soak;
  const std::uint64_t seed = std::strtoull(argv[1], nullptr, 10);
  const std::string folder = argv[2];
  ::alarm(120);
  int threads = 0, rank = 0, size = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &threads);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  auto plan = plan_of(seed, size);
  if (plan.by_file) plan.options.connect_file = folder + "/trainer.live";
  int solver = -1;
  for (int next = plan.trainers; solver + 1 < static_cast<int>(plan.solver_ranks.size()) && rank >= next;)
    next += plan.solver_ranks[static_cast<std::size_t>(++solver)];
  auto* const done = done_of_solvers(folder);
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, solver + 1, rank, &part);
  muster_live_world(nullptr);
  Dice dice(seed * 100 + static_cast<std::uint64_t>(rank));
  std::string wrong;
  const auto run = [&] {
    if (solver >= 0) {
      wrong = solve(plan, solver, part, plan.victim < 0, dice, done[solver]);
      return;
    }
    std::string program = "live_kills";
    std::array<char*, 2> arguments{program.data(), nullptr};
    Launch launch(1, arguments.data(), from_mpi(part));
    const auto code = launch.run([&] { wrong = train(plan, launch, plan.victim >= 0, dice, done); });
    if (code != 0) wrong += " ended with code " + std::to_string(code);
  };
  if (solver == plan.victim) {
    std::thread([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(plan.kill_after_us + dice.below(300)));
      ::kill(::getpid(), SIGKILL);
    }).detach();
    run();
    for (;;) ::pause();
  }
  run();
  const auto killed = plan.victim < 0 ? plan.trainers : plan.solver_ranks[static_cast<std::size_t>(plan.victim)];
  std::ofstream(folder + "/" + std::to_string(rank))
      << (wrong.empty() ? "ok" : wrong) << " of " << size - killed << '\n';
  MPI_Comm_free(&part);
  MPI_Finalize();
  return 0;
}
