// The benchmarks, and what they have in common.
#pragma once

#include "rounds.hpp"
#include "row.hpp"

#include <muster/launch.hpp>
#include <muster/session.hpp>

#include <functional>
#include <string>
#include <vector>

namespace muster::bench {

struct Options {
  std::vector<std::string> cases;  ///< the cases to measure, in their order
  int ranks = 2;
  int rounds = 0;  ///< 0: as many as fit a minute, up to a maximum
  bool json = false;
  bool with_peers = false;
  bool for_parent = false;   ///< print rows as JSON for the program that has started the ranks, which evaluates them
  std::string file = {};     ///< the dataset, "FILE.h5[:/group]", of a benchmark that reads one
  std::int64_t batch = 256;  ///< samples of a batch of that dataset
  bool progress = false;     ///< show progress even if stderr is not a terminal
};

/// Rounds for candidates inside one program: about a minute, unless options ask for a number.
Rounds rounds_inside(const Options& options);
/// Rounds for whole processes: about a minute for each program, unless options ask for a number.
Rounds rounds_of_processes(const Options& options, std::size_t programs);

struct Benchmark {
  std::string name = {};
  std::string description = {};
  std::vector<std::string> cases = {};
  /// Set for a benchmark of a file, on one rank: throws an Error for a file that cannot be measured.
  std::function<void(const std::string&)> check_file = {};
  /// Measures candidates inside one program. Called on every rank; returns the same rows on each. Empty: none.
  std::function<std::vector<Row>(Launch&, const Options&)> measure_in_process = {};
  /// Measures whole processes, outside of any launch; makes rows or adds to them. Empty: none.
  std::function<void(std::vector<Row>&, const Options&)> measure_processes = {};
};

Benchmark allreduce();
Benchmark step();
Benchmark data();
Benchmark start();
Benchmark recovery();
Benchmark checkpoint();

/// Runs `muster bench job NAME ARGUMENTS…` on each rank: the child process of a benchmark that compares whole
/// processes. The last line on stdout is its result in JSON.
void run_job(const std::string& name, const std::vector<std::string>& arguments);

/// The job of `checkpoint`: measures the median time of several saves, or of several restores.
void time_checkpoints(Session& session, const std::string& which);

/// Calls `body` in a launch on this rank. If it fails, the message is printed, and CLI::RuntimeError has the exit code.
void run_in_launch(const std::function<void(Launch&)>& body);

}  // namespace muster::bench
