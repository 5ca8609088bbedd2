// muster-bench: compares muster with its alternatives on this machine. `muster bench` starts it.
#include "bench.hpp"

#include "../command_line.hpp"
#include "../interrupt.hpp"
#include "../progress_line.hpp"
#include "base/temporary.hpp"
#include "base/text.hpp"
#include "programs.hpp"

#include <muster/error.hpp>

#include <stdlib.h>

#include <algorithm>
#include <array>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>

namespace muster::bench {
namespace {

/// A case that is stopped early still has a row if it has had this many rounds.
constexpr int least_rounds = 3;

std::string quoted(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "\"" : ", \"") + name + "\"";
  return text;
}

void choose_cases(const Entry& entry, const Benchmark& benchmark, Options& options) {
  if (options.cases.empty()) options.cases = benchmark.cases;
  for (const auto& name : options.cases)
    if (std::find(benchmark.cases.begin(), benchmark.cases.end(), name) == benchmark.cases.end())
      throw Error(ExitCode::usage, "reading --case", "there is no case \"" + name + "\"",
                  detail::str("The cases of ", entry.name, " are ", quoted(benchmark.cases)));
}

/// Returns the number of rounds that the options ask for; if they ask for none, at most `most` rounds within `time`.
Rounds rounds_of(const Options& options, int most, Clock::duration time) {
  if (options.rounds > 0) return {options.rounds};
  return {most, Clock::now() + time};
}

/// Returns "step mlp batch 64: at most 60 s".
std::string what_begins(const std::string& title, const Rounds& rounds) {
  if (!rounds.end) return detail::str(title, ": ", detail::counted(rounds.most, "round"));
  const auto left = std::chrono::ceil<std::chrono::seconds>(*rounds.end - Clock::now());
  return detail::str(title, ": at most ", left.count(), " s");
}

/// Calls `measure` for each case, to fill in the case's row. Prints the row if it has enough rounds, even if the
/// measurement then failed or was stopped. Throws an Error at the end if the machine was too noisy in some case.
/// `prints_rows`: true on the one rank that prints.
void measure_each(const Options& options, bool prints_rows, const std::function<void(Row&)>& measure) {
  std::vector<std::string> noisy;
  {
    std::optional<RowWriter> out;
    if (prints_rows) out.emplace(options.json);
    for (const auto& name : options.cases) {
      Row row{.name = name};
      std::exception_ptr failure;
      try {
        measure(row);
      } catch (...) {
        failure = std::current_exception();
      }
      const bool stopped = tool::InterruptGuard::has_come();
      if (out && row.rounds >= (stopped ? least_rounds : 1)) out->write(row);
      if (stopped) return;
      if (failure) std::rethrow_exception(failure);
      if (!row.valid()) noisy.push_back(row.name);
    }
  }
  if (!noisy.empty())
    throw Error(ExitCode::retry, "measuring",
                "two measurements of muster differ by more than 5 %, so these cases have no result: " + quoted(noisy),
                "Run it again when the machine is quiet");
}

/// Runs on ranks that another muster-bench has started. Rank 0 prints lines of JSON for it: {"show": …} and
/// {"round": …}, and at the end the row.
void measure_for_starter(Launch& launch, const Benchmark& benchmark, const Options& options) {
  const auto print = [&](const nlohmann::ordered_json& json) {
    if (launch.rank() == 0) std::cout << json.dump() << std::endl;
  };
  Measurement measurement{.rounds = rounds_of(options, 31, std::chrono::seconds(options.seconds))};
  measurement.show = [&](const std::string& text) { print({{"show", text}}); };
  measurement.keep = [&](const Timings& timings) {
    nlohmann::ordered_json round;
    for (std::size_t i = 0; i < timings.candidates.size(); ++i) round[timings.candidates[i]] = timings.ms[i].back();
    print({{"round", round}});
  };
  print(benchmark.measure_in_process(launch, options.cases.front(), options, measurement));
}

/// Runs the benchmark in this process, which a launcher has started as one of the ranks.
void measure_as_rank(const Entry& entry, const Benchmark& benchmark, const Options& options) {
  if (!benchmark.measure_in_process || options.with_peers)
    throw Error(ExitCode::usage, "comparing whole processes", "a launcher has started this program",
                "Start it without mpirun or srun; it starts its ranks itself");
  run_in_launch([&](Launch& launch) {
    if (entry.reads_file && launch.size() > 1)
      throw Error(ExitCode::usage, "measuring " + options.file,
                  detail::str("the launcher has started ", launch.size(), " ranks, and one rank reads"),
                  "Run it without the launcher");
    if (options.ranks_given && launch.size() != options.ranks)
      throw Error(ExitCode::usage, "reading -n",
                  detail::str("it asks for ", detail::counted(options.ranks, "rank"), " and the launcher has started ",
                              launch.size()),
                  "Leave it out");
    if (options.for_starter) return measure_for_starter(launch, benchmark, options);
    measure_each(options, launch.rank() == 0, [&](Row& row) {
      tool::ProgressLine line(options.progress);
      const auto title = detail::str(entry.name, " ", row.name);
      Measurement measurement{.rounds = rounds_of(options, 31, benchmark.time - time_to_end)};
      if (launch.rank() == 0) {
        line.announce(what_begins(title, measurement.rounds));
        measurement.show = [&](const std::string& text) { line.show(title + ": " + text); };
      }
      // Measure a second time if noise has made the row invalid, and if there is time.
      for (RoundTimer attempts({2, measurement.rounds.end});
           !row.valid() && has_next_round(attempts, launch.communicator());)
        row = benchmark.measure_in_process(launch, row.name, options, measurement);
    });
  });
}

/// Starts the ranks and makes the row from what they print. If they do not end in time, or a signal stops this program,
/// the row has the rounds until then.
void measure_on_ranks(const Entry& entry, const Options& options, const Measurement& measurement,
                      Clock::time_point deadline, Row& row) {
  std::vector<std::string> arguments{entry.name};
  if (entry.reads_file) arguments.insert(arguments.end(), {options.file, "--batch", std::to_string(options.batch)});
  arguments.insert(arguments.end(), {"--for-starter", "--case", row.name});
  if (const auto& rounds = measurement.rounds; rounds.end) {
    // The ranks also need time to start and to end.
    const auto time = std::chrono::duration_cast<std::chrono::seconds>((*rounds.end - Clock::now()) * 9 / 10);
    arguments.insert(arguments.end(), {"--seconds", std::to_string(std::max<std::int64_t>(1, time.count()))});
  } else {
    arguments.insert(arguments.end(), {"--rounds", std::to_string(rounds.most)});
  }
  auto command = on_ranks(options.ranks, arguments, options.hosts);
  command.quiet = false;
  command.deadline = deadline;
  Timings known;
  nlohmann::ordered_json result;
  command.on_line = [&](const std::string& text) {
    auto line = nlohmann::ordered_json::parse(text, nullptr, false);
    if (line.contains("show")) measurement.show(line["show"].get<std::string>());
    if (line.contains("case")) result = std::move(line);
    if (!line.contains("round")) return;
    known.ms.resize(line["round"].size());
    known.candidates.clear();
    for (const auto& [candidate, ms] : line["round"].items()) {
      known.ms[known.candidates.size()].push_back(ms);
      known.candidates.push_back(candidate);
    }
  };
  const auto finished = run(command);
  if (finished.end == End::itself) {
    if (finished.code != 0) throw CLI::RuntimeError(finished.code);  // a rank has printed the error
    if (result.is_null()) throw Error(ExitCode::retry, "reading the ranks' result", "they have printed none");
  } else if (finished.end == End::deadline) {
    const std::string fact = "the ranks have not ended in the time of the case";
    if (known.ms.empty())
      throw Error(ExitCode::retry, "measuring " + row.name, fact, "Give --rounds, which has no limit");
    measurement.warn(fact + "; the row has the rounds until then");
  }
  if (known.ms.empty()) return;
  row = make_row(row.name, known);
  if (result.is_object()) add_details(row, result);
}

void measure_case(const Entry& entry, const Benchmark& benchmark, const Options& options, Row& row) {
  tool::ProgressLine line(options.progress);
  const auto title = detail::str(entry.name, " ", row.name);
  Measurement measurement{.rounds = rounds_of(options, 11, benchmark.time)};
  line.announce(what_begins(title, measurement.rounds));
  measurement.show = [&](const std::string& text) { line.show(title + ": " + text); };
  measurement.warn = [&](const std::string& text) { line.print("muster: warning: " + title + ": " + text); };
  if (measurement.rounds.end) *measurement.rounds.end -= time_to_end;
  const bool peers = options.with_peers && benchmark.measure_processes;
  auto inside = measurement;
  if (benchmark.measure_in_process) {
    inside.rounds.most = options.rounds > 0 ? options.rounds : 31;
    // Leave three fifths of the time for the peers.
    if (inside.rounds.end && peers) *inside.rounds.end -= benchmark.time * 3 / 5;
  }
  const auto stopped = tool::InterruptGuard::has_come;
  for (RoundTimer attempts({2, inside.rounds.end}); !row.valid() && !stopped() && attempts.has_next();) {
    if (row.rounds > 0) line.announce(what_begins(title + ", again because of noise", inside.rounds));
    Row attempt{.name = row.name};
    if (benchmark.measure_in_process)
      measure_on_ranks(entry, options, inside, measurement.rounds.end.value_or(Clock::time_point::max()), attempt);
    else
      benchmark.measure_processes(attempt, options, measurement);
    if (attempt.rounds >= row.rounds || (attempt.valid() && !stopped())) row = std::move(attempt);
  }
  if (!benchmark.measure_in_process || !peers || stopped()) return;
  line.announce(what_begins(title + ", peers", measurement.rounds));
  benchmark.measure_processes(row, options, measurement);
}

void measure(const Entry& entry, const Benchmark& benchmark, const Options& options) {
  if (benchmark.check_file) benchmark.check_file(options.file);
  const tool::InterruptGuard interrupt;
  if (!options.hosts.empty() && options.with_peers && entry.name != std::string_view("step"))
    throw Error(ExitCode::usage, "reading --with-peers", "these peers run on this host alone", "Leave out --hosts");
  // Other hosts see the working directory more likely than this host's /tmp.
  const detail::TemporaryFolder folder(
      "muster-bench-", options.hosts.empty() ? detail::temporary_parent() : std::filesystem::current_path());
  ::setenv(folder_variable, folder.path().c_str(), 1);
  if (options.rounds == 0 && options.cases.size() > 1)
    tool::ProgressLine(options.progress)
        .announce(
            detail::str(entry.name, ": ", options.cases.size(), " cases of at most ", benchmark.time.count(), " s"));
  measure_each(options, true, [&](Row& row) { measure_case(entry, benchmark, options, row); });
  interrupt.check("what was known is printed");
}

void add(CLI::App& app, const Entry& entry, const Benchmark& benchmark) {
  auto* command = add_command(app, entry, [=](Options options) {
    choose_cases(entry, benchmark, options);
    if (started_by_launcher())
      measure_as_rank(entry, benchmark, options);
    else
      measure(entry, benchmark, options);
  });
  std::string cases;
  for (const auto& name : benchmark.cases) cases += "  " + name + "\n";
  command->footer("Cases:\n" + cases + "\nExample:\n  muster bench " + entry.name +
                  (entry.reads_file ? " train.h5" : " -n 2") + " --case \"" + benchmark.cases.front() + "\"");
}

void add_commands(CLI::App& app) {
  app.footer("Example:\n  muster bench step -n 2 --case \"mlp batch 64\" --with-peers");
  constexpr std::array<Benchmark (*)(), entries.size()> benchmarks{allreduce, step, data, checkpoint, start, recovery};
  for (std::size_t i = 0; i < entries.size(); ++i) add(app, entries[i], benchmarks[i]());

  auto* job = app.add_subcommand("job")->group("");
  const auto words = std::make_shared<std::vector<std::string>>();
  job->add_option("words", *words)->required();
  job->callback([words] { run_job(words->front(), {words->begin() + 1, words->end()}); });
}

}  // namespace

void run_in_launch(const std::function<void(Launch&)>& body) {
  // These variables are meant for the user's own runs and must not affect a benchmark.
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

int main(int argc, char** argv) {
  return muster::tool::run_command_line("muster bench", muster::bench::description, argc, argv,
                                        muster::bench::add_commands);
}
