// Batch scripts for Slurm and PBS, as pure functions of what the user has asked for.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace muster::tool {

struct BatchOptions {
  std::vector<std::string> command = {};  ///< the program and its arguments
  int nodes = 1;
  int gpus = 0;                            ///< of each node
  std::optional<int> ranks_per_node = {};  ///< one for each GPU, or else 2
  int cpus_per_rank = 1;
  std::chrono::seconds time = std::chrono::hours(1);
  std::string name = {};                 ///< of the job and of the run; empty: the program's
  std::string storage = {};              ///< the folder of the run's folder; empty: the program's default
  std::string queue = {}, account = {};  ///< empty: the user's default
  int chain = 0;                         ///< so many jobs, one after the other; 0: one that is queued again

  std::string written_by = {};                            ///< the command line that has asked for the script
  std::string tool = "muster";                            ///< how the script calls this program
  std::optional<std::chrono::seconds> longest_save = {};  ///< of an earlier run with that name
};

/// Parses a time as sbatch does: "MINUTES", "MM:SS", "HH:MM:SS", "D-HH", "D-HH:MM", "D-HH:MM:SS". None for another
/// text, and for a time of 0.
std::optional<std::chrono::seconds> parse_time(const std::string& text);

/// A word as bash must read it to get this text, in one line.
std::string shell_word(const std::string& text);

/// The value of a flag ("--name") of the program, as "--name demo" or "--name=demo"; none if it is not given.
std::optional<std::string> flag_in(const std::vector<std::string>& command, const std::string& flag);

/// How long before its end a Slurm job is signalled.
std::chrono::seconds signal_lead(const BatchOptions& options);

std::string slurm_script(const BatchOptions& options);
std::string pbs_script(const BatchOptions& options);

}  // namespace muster::tool
