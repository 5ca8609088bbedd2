// The benchmarks, and what they have in common.
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

/// The longest time of a case of whole jobs, peers included.
inline constexpr std::chrono::seconds whole_jobs_time{240};

struct Benchmark {
  std::vector<std::string> cases = {};
  std::chrono::seconds time{60};  ///< the longest of a case, peers included, unless a number of rounds is given
  /// Set for a benchmark of a file, on one rank: throws an Error for a file that cannot be measured.
  std::function<void(const std::string&)> check_file = {};
  /// Measures a case inside one program. Called on every rank; returns the same row on each. Empty: none.
  std::function<Row(Launch&, const std::string& name, const Options&, const Measurement&)> measure_in_process = {};
  /// Measures the case of a row in whole processes, outside of any launch; makes the row, or adds peers to it if
  /// options ask for them. Empty: none.
  std::function<void(Row&, const Options&, const Measurement&)> measure_processes = {};
};

Benchmark allreduce();
Benchmark step();
Benchmark data();
Benchmark start();
Benchmark recovery();
Benchmark checkpoint();

/// Runs `muster-bench job NAME ARGUMENTS…` on each rank: the child process of a benchmark that compares whole
/// processes. The last line on stdout is its result in JSON.
void run_job(const std::string& name, const std::vector<std::string>& arguments);

/// The job of `checkpoint`: measures the median time of several saves, or of several restores.
void time_checkpoints(Session& session, const std::string& which);

/// Calls `body` in a launch on this rank. If it fails, the message is printed, and CLI::RuntimeError has the exit code.
void run_in_launch(const std::function<void(Launch&)>& body);

}  // namespace muster::bench
