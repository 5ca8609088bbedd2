// muster run: starts a program on its ranks, watches it, and starts it again.
#include "commands.hpp"

#include <muster/error.hpp>
#include <muster/supervise.hpp>

#include <memory>

namespace muster::tool {

void add_run(CLI::App& app) {
  auto* command = app.add_subcommand("run", "Start a program on its ranks, and again when it fails");
  const auto options = std::make_shared<SuperviseOptions>();
  command->add_option("-n,--ranks", options->ranks, "Ranks [the tasks of the job, else the cores]")->option_text("N");
  command->add_option("--hosts", options->hosts, "Where, with how many slots [here, or the job's nodes]")
      ->check(CLI::Validator([](const std::string& text) { return text.empty() ? "it names no host" : ""; }, ""))
      ->option_text("n1,n2:4");
  command
      ->add_option("--max-failures", options->max_failures,
                   "Starts after failures, counted anew after progress; -1: no limit [the program's]")
      ->option_text("K");
  command
      ->add_option("--min-workers", options->min_workers,
                   "Go on with so few where there are no more, with as many samples in a step [all]")
      ->option_text("M");
  command->add_option("--spares", options->spares, "Slots to keep free for the ranks of a host that is lost [0]")
      ->option_text("N");
  command->add_flag("--requeue", options->requeue,
                    "Queue the Slurm job again at the end of its time, or when too few nodes are left");
  const auto grace =
      std::make_shared<int>(static_cast<int>(std::chrono::round<std::chrono::seconds>(options->grace).count()));
  command->add_option("--grace", *grace, "Seconds to save and stop in, before the end [60]")
      ->transform(whole_number(0, std::numeric_limits<int>::max()))
      ->option_text("S");
  command
      ->add_option(
          "command", options->command,
          "The program and its arguments; or several, as in -n 6 ./heat : -n 2 ./train, which always start with "
          "all their ranks")
      ->required()
      ->option_text("-- PROGRAM ARGS...");
  command->footer(
      "Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 let it save its state and stop\n"
      "(exit code 85); the second Ctrl-C ends it at once (130).\n\n"
      "Example:\n  muster run -n 2 --max-failures 3 -- ./fit --name demo --storage runs");
  command->callback([options, grace] {
    options->grace = std::chrono::seconds(*grace);
    if (const int code = supervise(*options); code != 0) throw CLI::RuntimeError(code);
  });
}

}  // namespace muster::tool
