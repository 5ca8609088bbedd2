// muster bench: compares muster with its alternatives on this machine.
#include "bench.hpp"

#include "../commands.hpp"
#include "../interrupt.hpp"
#include "peers.hpp"
#include "programs.hpp"

#include <muster/error.hpp>

#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

namespace muster::bench {
namespace {

constexpr std::chrono::seconds budget{60};

std::string quoted(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "\"" : ", \"") + name + "\"";
  return text;
}

void choose_cases(const Benchmark& benchmark, Options& options) {
  if (options.cases.empty()) options.cases = benchmark.cases;
  for (const auto& name : options.cases)
    if (std::find(benchmark.cases.begin(), benchmark.cases.end(), name) == benchmark.cases.end())
      throw Error(ExitCode::usage, "reading --case", "there is no case \"" + name + "\"",
                  "The cases of " + benchmark.name + " are " + quoted(benchmark.cases));
}

/// Measures each case with `rows_of`, and prints its rows at once.
template <class RowsOf>
void measure_each(Options options, bool speaks, bool judges, RowsOf&& rows_of) {
  std::vector<std::string> noisy;
  {
    std::optional<RowWriter> out;
    if (speaks) out.emplace(options.json || options.for_parent);
    for (const auto& name : std::exchange(options.cases, {})) {
      options.cases = {name};
      for (const auto& row : rows_of(options)) {
        if (out) out->write(row);
        if (!row.valid()) noisy.push_back(row.name);
      }
    }
  }
  if (judges && !noisy.empty())
    throw Error(ExitCode::retry, "measuring",
                "two measurements of muster differ by more than 5 %, so these cases have no result: " + quoted(noisy),
                "Run it again when the machine is quiet");
}

/// The rows that `measure` returns; if noise has made one invalid, measures a second time.
template <class Measure>
std::vector<Row> measured(Measure&& measure) {
  auto rows = measure();
  if (!std::ranges::all_of(rows, &Row::valid)) rows = measure();
  return rows;
}

/// Runs the benchmark in this process, which is one of the ranks.
void measure_as_rank(const Benchmark& benchmark, const Options& options, bool ranks_given) {
  if (!benchmark.measure_in_process || options.with_peers)
    throw Error(ExitCode::usage, "comparing whole processes", "a launcher has started this program",
                "Start it without mpirun or srun; it starts its ranks itself");
  run_in_launch([&](Launch& launch) {
    if (benchmark.check_file && launch.size() > 1)
      throw Error(ExitCode::usage, "measuring " + options.file,
                  "the launcher has started " + std::to_string(launch.size()) + " ranks, and one rank reads",
                  "Run it without the launcher");
    if (ranks_given && launch.size() != options.ranks)
      throw Error(ExitCode::usage, "reading -n",
                  "it asks for " + std::to_string(options.ranks) + (options.ranks == 1 ? " rank" : " ranks") +
                      " and the launcher has started " + std::to_string(launch.size()),
                  "Leave it out");
    measure_each(options, launch.rank() == 0, !options.for_parent, [&](const Options& one) {
      const auto measure = [&] { return benchmark.measure_in_process(launch, one); };
      return options.for_parent ? measure() : measured(measure);
    });
  });
}

/// Starts the ranks and reads the rows from their output.
std::vector<Row> rows_from_ranks(const Benchmark& benchmark, const Options& options) {
  std::vector<std::string> arguments{benchmark.name};
  if (benchmark.check_file) arguments.insert(arguments.end(), {options.file, "--batch", std::to_string(options.batch)});
  arguments.emplace_back("--for-starter");
  if (options.rounds > 0) arguments.insert(arguments.end(), {"--rounds", std::to_string(options.rounds)});
  for (const auto& name : options.cases) arguments.insert(arguments.end(), {"--case", name});
  if (options.progress || ::isatty(STDERR_FILENO) == 1) arguments.emplace_back("--progress");
  auto command = on_ranks(options.ranks, arguments);
  command.quiet = false;
  const auto finished = run(command);
  const auto rows = nlohmann::ordered_json::parse(finished.out, nullptr, false);
  if (rows.is_array()) return rows.get<std::vector<Row>>();
  if (finished.code != 0) throw CLI::RuntimeError(finished.code);  // a rank has said why
  throw Error(ExitCode::retry, "reading the ranks' result", "they have printed none");
}

void measure(const Benchmark& benchmark, const Options& options) {
  if (benchmark.check_file) benchmark.check_file(options.file);
  const tool::InterruptGuard interrupt;
  const ScratchFolder folder;
  ::setenv(folder_variable, folder.path().c_str(), 1);
  measure_each(options, true, true, [&](const Options& one) {
    if (!benchmark.measure_in_process)
      return measured([&] {
        std::vector<Row> rows;
        benchmark.measure_processes(rows, one);
        return rows;
      });
    auto rows = measured([&] { return rows_from_ranks(benchmark, one); });
    if (benchmark.measure_processes) benchmark.measure_processes(rows, one);
    return rows;
  });
}

/// The options of a benchmark of a file.
void add_file(CLI::App& command, Options& options) {
  options.ranks = 1;
  command.add_option("file", options.file, "The dataset, FILE.h5[:/group]")->option_text("FILE")->required();
  command.add_option("--batch", options.batch, "Samples of a batch; 256 unless given")
      ->transform(tool::whole_number(1))
      ->option_text("N");
}

void add(CLI::App& parent, const Benchmark& benchmark) {
  auto* command = parent.add_subcommand(benchmark.name, benchmark.description);
  const auto options = std::make_shared<Options>();
  const CLI::Option* ranks = nullptr;
  if (benchmark.check_file)
    add_file(*command, *options);
  else
    ranks = command->add_option("-n,--ranks", options->ranks, "Ranks; 2 unless given")
                ->transform(tool::whole_number(1, std::numeric_limits<int>::max()))
                ->option_text("N");
  command->add_flag("--json", options->json, "Print the rows as JSON");
  if (!benchmark.check_file)
    command->add_flag("--with-peers", options->with_peers, "Also run the peers that are programs of their own");
  command->add_option("--rounds", options->rounds, "Rounds of each case; as many as fit a minute unless given")
      ->transform(tool::whole_number(1, std::numeric_limits<int>::max()))
      ->option_text("R");
  command->add_option("--case", options->cases, "Only these cases")->option_text("NAME...");
  command->add_flag("--for-starter", options->for_parent)->group("");
  command->add_flag("--progress", options->progress)->group("");
  std::string cases;
  for (const auto& name : benchmark.cases) cases += "  " + name + "\n";
  command->footer("Cases:\n" + cases + "\nExample:\n  muster bench " + benchmark.name +
                  (benchmark.check_file ? " train.h5" : " -n 2") + " --case \"" + benchmark.cases.front() + "\"");
  command->callback([benchmark, options, ranks] {
    choose_cases(benchmark, *options);
    if (started_by_launcher())
      measure_as_rank(benchmark, *options, ranks != nullptr && ranks->count() > 0);
    else
      measure(benchmark, *options);
  });
}

}  // namespace

Rounds rounds_inside(const Options& options) {
  if (options.rounds > 0) return {options.rounds};
  return {31, budget};
}

Rounds rounds_of_processes(const Options& options, std::size_t programs) {
  if (options.rounds > 0) return {options.rounds};
  return {11, budget * static_cast<int>(programs)};
}

void run_in_launch(const std::function<void(Launch&)>& body) {
  // Variables for the user's own runs, which must not affect a benchmark.
  for (const auto* name : {"MUSTER_STORAGE", "MUSTER_NAME", "MUSTER_CONFIG", "MUSTER_RESUME", "MUSTER_WORKERS",
                           "MUSTER_TIME_LIMIT", "MUSTER_SEED"})
    ::unsetenv(name);
  std::array<std::string, 7> words{"muster", "--threads", "1", "--progress", "none", "--log-level", "warn"};
  std::array<char*, words.size() + 1> argv{};
  std::transform(words.begin(), words.end(), argv.begin(), [](auto& word) { return word.data(); });
  int code = 0;
  {
    Launch launch(static_cast<int>(words.size()), argv.data());
    code = launch.run([&] { body(launch); });
  }
  if (code != 0) throw CLI::RuntimeError(code);
}

}  // namespace muster::bench

void muster::tool::add_bench(CLI::App& app) {
  auto* command = app.add_subcommand("bench", "Measure muster beside MPI, torch's DDP and the machine itself");
  command->require_subcommand(1);
  command->footer("Example:\n  muster bench step -n 2 --case \"mlp batch 64\" --with-peers");
  for (const auto& benchmark :
       {bench::allreduce(), bench::step(), bench::data(), bench::checkpoint(), bench::start(), bench::recovery()})
    bench::add(*command, benchmark);

  auto* job = command->add_subcommand("job")->group("");
  const auto words = std::make_shared<std::vector<std::string>>();
  job->add_option("words", *words)->required();
  job->callback([words] { bench::run_job(words->front(), {words->begin() + 1, words->end()}); });
}
