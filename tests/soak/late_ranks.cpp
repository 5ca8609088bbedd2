// Trains with a disturbance on the last rank, or with none, and says which ranks were named as late.
//   mpirun -n RANKS late_ranks DISTURBANCE STEPS [CONTROL-GROUP]
// DISTURBANCE is none, quota (CONTROL-GROUP, in which the rank is, gets 77% of a core), competitor (another process on
// its core), thread (another thread of its own on its core) or data (its batches take longer). It begins after 40
// steps. Rank 0 prints a line of JSON: the step of the disturbance, the steps and their mean time, and for each rank
// named: rank, cause, step.
#include "muster/callbacks.hpp"
#include "muster/data_loader.hpp"
#include "muster/muster.hpp"

#include <ATen/ATen.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <torch/data/datasets/base.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

constexpr std::int64_t quiet_steps = 40;

std::string disturbance, control_group;
std::int64_t steps = 0;
bool is_disturbed_rank = false;

struct Listener : muster::Callback {
  void on_batch(std::int64_t step) override { now = step; }
  void on_late_rank(const muster::LateRank& late) override {
    named.push_back({{"rank", late.rank}, {"cause", to_string(late.cause)}, {"step", now}, {"behind", late.behind}});
  }
  std::int64_t now = 0;
  muster::Json named = muster::Json::array();
};

/// Its samples take longer once `delay` is set. Only the thread that reads ahead uses it.
struct Samples : torch::data::datasets::Dataset<Samples> {
  torch::data::Example<> get(std::size_t) override {
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us.load()));
    return {at::rand({256, 784}), at::zeros({1})};
  }
  c10::optional<std::size_t> size() const override { return 1'000'000; }
  static inline std::atomic<std::int64_t> delay_us{0};
};

/// Computes for ever, with about a third of the share of the core that the rank has.
[[noreturn]] void compete() {
  ::setpriority(PRIO_PROCESS, 0, 5);  // of this thread alone
  for (volatile std::uint64_t count = 0;; count = count + 1) continue;
}

/// Starts a process that competes for this rank's core until this process ends.
void start_competitor() {
  const auto parent = ::getpid();
  if (const auto child = ::fork(); child != 0) {
    if (child < 0) throw std::runtime_error("fork failed");
    return;
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(0);
  compete();
}

/// 77% of a core, in the usual period of 100 ms: in version 2 of control groups, or else in version 1.
void set_quota() {
  const std::filesystem::path group(control_group);
  if (exists(group / "cpu.max")) {
    std::ofstream(group / "cpu.max") << "77000 100000\n";
  } else {
    std::ofstream(group / "cpu.cfs_period_us") << "100000\n";
    std::ofstream(group / "cpu.cfs_quota_us") << "77000\n";
  }
}

void disturb(double step_seconds) {
  if (!is_disturbed_rank) return;
  if (disturbance == "quota") set_quota();
  if (disturbance == "competitor") start_competitor();
  if (disturbance == "thread") std::thread(compete).detach();
  // Batches are read ahead, so that only those that take longer than a step delay it.
  if (disturbance == "data") Samples::delay_us = static_cast<std::int64_t>(1.3e6 * step_seconds);
}

/// Binds each rank to a core of its own, as launchers do.
void bind_to_core(int rank) {
  cpu_set_t all, own;
  ::sched_getaffinity(0, sizeof all, &all);
  int skipped = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &all) || skipped++ != rank % CPU_COUNT(&all)) continue;
    CPU_ZERO(&own);
    CPU_SET(cpu, &own);
    ::sched_setaffinity(0, sizeof own, &own);
    return;
  }
}

void train(muster::Session& session, const muster::Config&) {
  using Clock = std::chrono::steady_clock;
  auto net = session.prepare_model(
      torch::nn::Sequential(torch::nn::Linear(784, 1024), torch::nn::Linear(1024, 1024), torch::nn::Linear(1024, 10)));
  auto optimizer = session.prepare_optimizer(torch::optim::SGD(net->parameters(), 1e-6));
  auto loader = muster::prepare_data_loader(session, Samples(), {.batch_size = 1});
  const auto begun = Clock::now();
  std::int64_t step = 0;
  for (auto& batch : *loader) {
    if (++step == quiet_steps) disturb(std::chrono::duration<double>(Clock::now() - begun).count() / quiet_steps);
    optimizer.zero_grad();
    net->forward(batch.front().data.flatten(0, -2)).pow(2).mean().backward();
    optimizer.step();
    if (step == steps) break;
  }
  session.report({{"step_ms", 1e3 * std::chrono::duration<double>(Clock::now() - begun).count() / step}});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return std::fputs("late_ranks DISTURBANCE STEPS [CONTROL-GROUP]\n", stderr), 64;
  disturbance = argv[1];
  steps = std::atoll(argv[2]);
  if (argc > 3) control_group = argv[3];
  const auto folder = std::filesystem::temp_directory_path() / ("late_ranks-" + std::to_string(::getppid()));
  muster::Launch launch(1, argv);
  is_disturbed_rank = launch.rank() == launch.size() - 1;
  bind_to_core(launch.rank());
  if (is_disturbed_rank && !control_group.empty())
    std::ofstream(std::filesystem::path(control_group) / "cgroup.procs") << ::getpid() << "\n";
  const auto listener = std::make_shared<Listener>();
  const int code = launch.run([&] {
    muster::TorchTrainerOptions options{.scaling_config = {.threads_per_worker = 1}};
    options.run_config = {.name = "run", .storage_path = folder, .callbacks = {listener}};
    options.run_config.logging_config.file = false;
    return muster::TorchTrainer(launch, train, options).fit();
  });
  if (launch.rank() == 0) {
    const auto result = muster::Result::from_path(folder / "run");
    const muster::Json line{{"disturbed_at", disturbance == "none" ? 0 : quiet_steps},
                            {"steps", steps},
                            {"step_ms", result.metrics.at("step_ms")},
                            {"named", listener->named}};
    std::printf("%s\n", line.dump().c_str());
    std::filesystem::remove_all(folder);
  }
  return code;
}
