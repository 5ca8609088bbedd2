// The benchmarks, and what they share. A peer is another program or method with which muster is compared.
#pragma once

#include "options.hpp"
#include "rounds.hpp"
#include "row.hpp"

#include <muster/launch.hpp>
#include <muster/session.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace muster::bench {

/// The most time that a case of the benchmarks `start` and `recovery` may take, with its peers.
inline constexpr std::chrono::seconds whole_jobs_time{240};

struct Benchmark {
  std::vector<std::string> cases = {};
  /// The most time that a case may take, with its peers, unless a number of rounds is given.
  std::chrono::seconds time{60};
  /// Throws an Error for a file that cannot be measured. Set if the benchmark reads a file; it then runs on one rank.
  std::function<void(const std::string&)> check_file = {};
  /// Measures a case inside this program. Called on every rank; returns the same row on each. Empty if no case is
  /// measured in this way.
  std::function<Row(Launch&, const std::string& name, const Options&, const Measurement&)> measure_in_process = {};
  /// Measures a case by running whole processes, without a launch in this program. Makes the row; or, if
  /// measure_in_process() has made it, adds peers to it. Empty if no case is measured in this way.
  std::function<void(Row&, const Options&, const Measurement&)> measure_processes = {};
};

Benchmark allreduce();
Benchmark step();
Benchmark data();
Benchmark start();
Benchmark recovery();
Benchmark checkpoint();

/// Carries out `muster-bench job NAME ARGUMENTS…`, which a benchmark that compares whole processes starts on each rank.
/// The last line that rank 0 prints to stdout is the job's result in JSON.
void run_job(const std::string& name, const std::vector<std::string>& arguments);

/// The job for the benchmark `checkpoint`: rank 0 prints the median time of three saves or three restores.
void time_checkpoints(Session& session, const std::string& which);

/// Calls `body` in a launch on this rank. If it fails, prints the error and throws a CLI::RuntimeError with the exit
/// code.
void run_in_launch(const std::function<void(Launch&)>& body);

}  // namespace muster::bench
