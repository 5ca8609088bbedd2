// A run that counts in its state how often each sample was seen, and harms itself at a step as its settings say.
// At the end every sample must have been seen once in each epoch, whatever happened. --end: how the process ends after
// its run, or that a second run follows. --validates: the run's last state is validated.
#include "muster/launch.hpp"
#include "muster/trainer.hpp"

#include <CLI/CLI.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

constexpr std::int64_t samples = 400;
constexpr std::int64_t global_batch = 40;

void do_it(const std::string& fault) {
  if (fault == "kill") ::raise(SIGKILL);
  if (fault == "throw") throw std::runtime_error("the loss is a teapot");
  if (fault.starts_with("exit ")) std::exit(std::atoi(fault.c_str() + 5));
}

double seconds_of_thread() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Computes for a second of this thread's own time, in which a suspension does not count.
void compute() {
  std::puts("takes long");
  std::fflush(stdout);
  for (const double end = seconds_of_thread() + 1; seconds_of_thread() < end;) {
  }
}

/// The step is done: says so, with the time by the clock that all processes of a machine share.
void say(const muster::Session& session, std::int64_t step, std::int64_t size) {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  std::printf("step %lld rank %d pid %d samples %lld ms %lld\n", static_cast<long long>(step), session.world_rank(),
              static_cast<int>(::getpid()), static_cast<long long>(size),
              static_cast<long long>(now.tv_sec) * 1000 + now.tv_nsec / 1'000'000);
  std::fflush(stdout);
}

void train(muster::Session& session, const muster::Config& config) {
  const std::string fault = config.at("fault");
  const std::int64_t epochs = config.at("epochs"), at = config.at("at"), every = config.at("every");
  auto seen = at::zeros({samples}, at::kLong);
  auto state = session.state({{"seen", seen}});
  const bool goes_on = state.restore();
  const bool faulty = session.world_rank() == config.at("rank") && (!goes_on || config.at("always"));
  if (faulty && at == 0) do_it(fault);
  for ([[maybe_unused]] const auto epoch : session.epochs(epochs)) {
    if (config.at("report_first")) session.report({{"step", session.global_step()}}, state);
    for (const auto& batch :
         session.get_dataset_shard().iter_torch_batches({.batch_size = config.at("batch_size"), .shuffle = true})) {
      std::vector<std::int64_t> own(samples);
      const auto* const x = batch["x"].const_data_ptr<std::int64_t>();
      for (std::int64_t i = 0; i < batch.size(); ++i) ++own[static_cast<std::size_t>(x[i])];
      session.communicator().all_reduce(std::span(own));
      for (std::int64_t i = 0; i < samples; ++i) seen[i] += own[static_cast<std::size_t>(i)];
      std::this_thread::sleep_for(
          std::chrono::milliseconds(config.at("work_ms").get<int>()));  // a signal does not end it
      say(session, session.global_step(), batch.global_size());
      if (config.at("same_batch") && batch.global_size() != global_batch)
        throw std::runtime_error("the step has " + std::to_string(batch.global_size()) + " samples");
      if (faulty && session.global_step() == at && fault == "announce") {
        session.keep_alive(std::chrono::seconds(4));
        compute();
      }
      if (faulty && session.global_step() == at) do_it(fault);
      if (session.global_step() % every == 0) session.report({{"step", session.global_step()}}, state);
    }
  }
  if (config.at("validates")) session.report({{"step", session.global_step()}}, state, {.validation = true});
  if (!seen.eq(epochs).all().item<bool>()) throw std::runtime_error("a sample was lost or came twice");
  if (session.world_rank() == 0) std::printf("every sample was seen %lld times\n", static_cast<long long>(epochs));
}

muster::Metrics validate(muster::Session&, const muster::Checkpoint&) {
  compute();
  return {{"validated", 1}};
}

std::unique_ptr<muster::Launch> launch_of_process;

}  // namespace

int main(int argc, char** argv) {
  launch_of_process = std::make_unique<muster::Launch>(argc, argv);
  auto& launch = *launch_of_process;
  int least = 0;
  bool validates = false;
  std::string end = "destroyed";
  launch.app().add_option("--least", least, "Workers that are enough, of 4");
  launch.app().add_option("--end", end);
  launch.app().add_flag("--validates", validates);
  const int code = launch.run([&] {
    const muster::NumWorkers all, range(least, 4);
    muster::TorchTrainerOptions options{
        .train_loop_config = {{"fault", ""},
                              {"at", -1},
                              {"rank", 1},
                              {"always", false},
                              {"every", 5},
                              {"batch_size", 20},
                              {"epochs", 4},
                              {"work_ms", 20},
                              {"same_batch", false},
                              {"report_first", false},
                              {"validates", validates}},
        .scaling_config = {.num_workers = least > 0 ? range : all},
        .run_config = {.checkpoint_config = {.num_to_keep = 2}},
        .datasets = {{"train", muster::Dataset::from_tensors({{"x", at::arange(samples)}})}}};
    if (validates) options.validation = {.function = validate, .timeout = std::chrono::seconds(4)};
    auto result = muster::TorchTrainer(launch, train, options).fit();
    if (end == "lost") do_it("kill");
    if (end == "between") {
      const auto lost = *launch.flags().storage / "lost";
      const bool is_first_start = !std::filesystem::exists(lost);
      launch.communicator().barrier();
      if (is_first_start && launch.rank() == 1) {
        std::ofstream(lost).put('\n');
        do_it("kill");
      }
      if (is_first_start) launch.communicator().barrier();  // so that the second run does not begin
      result = muster::TorchTrainer(launch, train, options).fit();
    }
    return result;
  });
  if (end == "goes_on") {
    std::puts("goes on");
    std::fflush(stdout);
    for (;;) ::pause();
  }
  if (end == "exit") std::exit(code);
  if (end == "quick_exit") std::quick_exit(code);
  if (end == "_exit") ::_exit(code);
  if (end == "abort") std::abort();
  if (end == "static") return code;
  if (end == "never") static_cast<void>(launch_of_process.release());
  launch_of_process.reset();
  return end == "other" ? 3 : code;
}
