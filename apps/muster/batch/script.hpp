// Writes batch scripts for Slurm and PBS, as pure functions of the options.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace muster::tool {

struct BatchOptions {
  std::vector<std::string> command = {};  ///< the program and its arguments
  int nodes = 1;
  int gpus = 0;                            ///< GPUs on each node
  std::optional<int> ranks_per_node = {};  ///< default: one for each GPU; without GPUs, 2
  int cpus_per_rank = 1;
  std::chrono::seconds time = std::chrono::hours(1);
  std::string name = {};     ///< name of the job and of the run; empty for the program's name
  std::string storage = {};  ///< the folder that will have the run's folder; empty for the program's default
  std::string queue = {}, account = {};  ///< empty for the user's default
  int chain = 0;  ///< number of jobs that run one after the other; 0 for one job that is queued again

  std::string written_by = {};                            ///< the command line that has made the script
  std::string tool = "muster";                            ///< the name or path by which the script calls this program
  std::optional<std::chrono::seconds> longest_save = {};  ///< in earlier starts of the run; none if unknown
};

/// Parses a time in sbatch's forms: "MINUTES", "MM:SS", "HH:MM:SS", "D-HH", "D-HH:MM", "D-HH:MM:SS". None if the text
/// has another form or the time is 0.
std::optional<std::chrono::seconds> parse_time(const std::string& text);

/// Returns a word that bash reads as this text, on one line.
std::string shell_word(const std::string& text);

/// Returns the value of a flag ("--name") in the program's arguments, given as "--name demo" or "--name=demo"; none if
/// it is not there.
std::optional<std::string> flag_in(const std::vector<std::string>& command, const std::string& flag);

/// Returns how long before the end of its time a Slurm job gets a signal.
std::chrono::seconds signal_lead(const BatchOptions& options);

std::string slurm_script(const BatchOptions& options);
std::string pbs_script(const BatchOptions& options);

}  // namespace muster::tool
