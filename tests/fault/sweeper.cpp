// A sweep of four trials that count epochs, of which the second kills its ranks as --kill says. A run of the same
// name may follow, which fails.
#include "muster/launch.hpp"
#include "muster/sweep.hpp"

#include <signal.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

std::string text_in(const std::filesystem::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

void train(muster::Session& session, const muster::Config& config, const std::filesystem::path& sweep,
           std::int64_t kill) {
  const int number = config.at("number");
  const std::int64_t epochs = config.at("epochs");
  std::int64_t done = 0;
  auto state = session.state({{"done", done}});
  state.restore();
  const auto before = done;
  while (done < epochs) {
    if (session.world_rank() == 0) std::printf("trial %d epoch %d\n", number, static_cast<int>(done));
    std::fflush(stdout);
    if (number == 1 && done == before + 1 && kill > before) {
      // Not before the first trial is done, so that a second run of it would be noticed.
      while (text_in(sweep / "trial_00000" / "trial.json").find("\"done\"") == std::string::npos)
        std::this_thread::yield();
      ::raise(SIGKILL);
    }
    ++done;
    session.report({{"number", number}}, state);
  }
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  int retries = 0;
  std::int64_t kill = 0;
  bool then_fails = false, kill_always = false, save_first = false;
  launch.app().add_option("--retries", retries, "FailureConfig::max_failures of the trials");
  launch.app().add_option("--kill", kill,
                          "Trial 1 kills its ranks in its second epoch, where it has saved fewer than this");
  std::string metric = "number";
  launch.app().add_option("--metric", metric, "By which trials are compared");
  launch.app().add_flag("--kill-always", kill_always, "Trial 1 kills its ranks before it has done anything");
  launch.app().add_flag("--save-first", save_first, "Before that it saves its state");
  launch.app().add_flag("--then-fails", then_fails, "A run follows, which fails");
  return launch.run([&] {
    const auto sweep = *launch.flags().storage / *launch.flags().name;
    muster::TorchTrainer trainer(launch,
                                 [&](muster::Session& session, const muster::Config& config) {
                                   if (kill_always && config.at("number") == 1) {
                                     std::int64_t done = 0;
                                     auto state = session.state({{"done", done}});
                                     state.restore();
                                     if (save_first) session.report({{"number", 1}}, state);
                                     ::raise(SIGKILL);
                                   }
                                   train(session, config, sweep, kill);
                                 },
                                 {.train_loop_config = {{"number", 0}, {"epochs", 3}},
                                  .run_config = {.failure_config = {.max_failures = retries}}});
    auto result =
        muster::Sweep(
            launch, trainer.as_trainable(),
            {.space = {{"number", muster::grid({0, 1, 2, 3})}}, .metric = metric, .mode = muster::ScoreOrder::max})
            .fit();
    if (then_fails)
      result.error = muster::TorchTrainer(launch, [](muster::Session&) { throw std::runtime_error("the tea is cold"); })
                         .fit()
                         .error;
    return result;
  });
}
