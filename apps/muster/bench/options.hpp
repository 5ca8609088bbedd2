// The command line of `muster bench`. Not only muster-bench has it, but also muster, for its help and completion.
#pragma once

#include <CLI/CLI.hpp>

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace muster::bench {

inline constexpr const char* description = "Measure muster beside MPI, torch's DDP and the machine itself";

/// A benchmark, as a command of `muster bench`.
struct Entry {
  const char* name;
  const char* description;
  bool reads_file = false;  ///< true if it measures a dataset file, on one rank
  bool has_hosts = false;   ///< true if its ranks may be on several hosts
};

inline constexpr std::array<Entry, 6> entries{
    {{"allreduce", "Sum fp32 values over the ranks in place, against MPI", false, true},
     {"step", "Train, against no communication, plain MPI and torch's DDP", false, true},
     {"data", "Read a dataset file on one rank, against plain reading", true},
     {"checkpoint", "Save 420 MB until durable, and restore them, against the disk and torch"},
     {"start", "Launch to the end of the first step, whole jobs"},
     {"recovery", "SIGKILL of a rank to the end of the next step, whole jobs"}}};

struct Options {
  std::vector<std::string> cases = {};  ///< the cases to measure, in this order; empty for all
  int ranks = 2;
  bool ranks_given = false;
  std::string hosts = {};  ///< "n1:1,n2:1" for mpirun; empty for this host
  int rounds = 0;          ///< 0 for as many as fit into the time of a case, up to a maximum
  bool json = false;
  bool with_peers = false;
  std::string file = {};     ///< for a benchmark that reads a dataset: "FILE.h5[:/group]"
  std::int64_t batch = 256;  ///< samples per batch of that dataset
  bool progress = false;     ///< show progress even if stderr is not a terminal
  bool for_starter = false;  ///< print each round for the program that has started these ranks and makes the rows
  int seconds = 60;          ///< with for_starter: time for a case
};

/// Adds the command of a benchmark with its options. When it is used, `run` is called with the options.
CLI::App* add_command(CLI::App& parent, const Entry& entry, std::function<void(const Options&)> run);

}  // namespace muster::bench
