// What a benchmark is, and those that there are.
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
  std::vector<std::string> cases;  ///< those to measure, in their order
  int ranks = 2;
  int rounds = 0;  ///< 0: as many as a minute has, up to a number
  bool json = false;
  bool with_peers = false;
  bool for_starter = false;  ///< rows go, as JSON, to the program that has started the ranks, and it judges them
  bool progress = false;     ///< shown though stderr is no terminal
};

/// Of candidates inside one program: about a minute, unless options ask for a number.
Rounds rounds_inside(const Options& options);
/// Of whole processes: about a minute for each program.
Rounds rounds_of_processes(const Options& options, std::size_t programs);

struct Benchmark {
  std::string name = {};
  std::string description = {};
  std::vector<std::string> cases = {};
  /// Measures what runs inside one program; called on every rank and gives the same rows to each. Empty: there is none.
  std::function<std::vector<Row>(Launch&, const Options&)> inside = {};
  /// Measures whole processes from outside of any launch; adds to the rows or makes them. Empty: there are none.
  std::function<void(std::vector<Row>&, const Options&)> processes = {};
};

Benchmark allreduce();
Benchmark step();
Benchmark start();
Benchmark recovery();
Benchmark checkpoint();

/// What `muster bench job NAME ARGUMENTS…` runs on each rank: a child of a benchmark that compares whole processes. Its
/// last line on stdout is its result in JSON.
void run_job(const std::string& name, const std::vector<std::string>& arguments);

/// The job of `checkpoint`: the median time of some saves, or of some restores.
void time_checkpoints(Session& session, const std::string& which);

/// Calls `body` on this rank of a launch; where that fails its message is printed and CLI::RuntimeError has its code.
void launched(const std::function<void(Launch&)>& body);

}  // namespace muster::bench
