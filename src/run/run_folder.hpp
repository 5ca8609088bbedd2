// The folder of a run: its name, the lock of the job that uses it, params.json and error.txt.
#pragma once

#include "base/export.hpp"
#include "comm/agreement.hpp"
#include "muster/communicator.hpp"
#include "muster/config.hpp"
#include "muster/launch.hpp"
#include "run/run_lock.hpp"

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::run {

/// Throws an Error (ExitCode::usage) unless `name` is one plain folder name.
void check_run_name(const std::string& name);

/// The run's seed: that of --seed, otherwise that of params.json (null for a new run).
MUSTER_INTERNAL_API std::uint64_t seed_of(const LaunchFlags& flags, const Json& params);

/// The absolute path, without a slash at its end, so that filename() is its last name. Throws
/// an Error (ExitCode::usage) if it is empty.
MUSTER_INTERNAL_API std::filesystem::path absolute_path(const std::filesystem::path& path);

/// STORAGE/NAME, locked by this job as long as the object lives. The same on every rank; rank 0 writes.
class MUSTER_INTERNAL_API RunFolder {
 public:
  /// Chooses the name: the flag's, else RunConfig's, else program and Slurm job or time. Each start in a Slurm job gets
  /// a name of its own, unless Slurm has requeued the job or `muster run` has restarted it. Then makes the folder,
  /// locks it, checks that every node sees the same storage, and removes unfinished files of an interrupted job.
  /// `trainer`: the trainer's number in the launch (Launch::next_trainer_number); from the second on it is appended to
  /// the flag's name. Throws an Error if another job uses the folder, or if the flag names another program's run.
  /// Collective over the world.
  RunFolder(const Communicator& world, const Launch& launch, const RunConfig& config, int trainer = 1);

  /// Throws an Error (ExitCode::usage) if the folder was moved away while the job runs and another one is at its path.
  /// On rank 0.
  void require_not_replaced() const;
  /// Gives up the lock: other jobs may use the folder, and this job only reads it. On every rank.
  void release() noexcept { lock_.reset(); }
  /// Gives up the lock and removes the folder, unless it holds more than the files that every run writes. Removes the
  /// storage, too, if this run has made it and it is empty. Collective over the world.
  void remove_if_unused(const Communicator& world);

  const std::filesystem::path& path() const noexcept { return path_; }
  const std::string& name() const noexcept { return name_; }
  /// "Start it again with --name NAME to go on": a remedy for a program that was stopped. The name is that of the
  /// program's first run, from which the names of later ones follow.
  const std::string& how_to_go_on() const noexcept { return how_to_go_on_; }

  /// True if `path` lies in the run of an earlier trainer of this launch under the same --name. Then --resume `path` is
  /// not meant for this run.
  bool is_in_run_of_earlier_trainer(const std::filesystem::path& path) const;
  /// True if this is the launch's first run under --name.
  bool is_first_trainer() const noexcept { return earlier_runs_.empty(); }

  /// True if an earlier start of the same `muster run` has used this folder.
  bool is_restart() const noexcept { return is_restart_; }
  /// The content of params.json. On ranks other than 0 it stays as it was before this job. Null for a new run.
  const Json& params() const noexcept { return params_; }
  /// Replaces params.json. On one rank.
  void write_params(Json params);
  /// Writes to params.json that training is finished, and the training function's return value. A failure is a warning.
  /// On the same rank.
  void mark_finished(const Json& returned) noexcept;
  /// Restores params.json as it was before a start that was refused and has changed nothing else; error.txt keeps its
  /// cause. A failure is a warning. On the same rank.
  void restore_params(Json params) noexcept;
  /// Removes error.txt: training begins, or was stopped on request. On one rank.
  void clear_error() const noexcept;
  /// Writes the root cause of a failure to error.txt. A failure to write is a warning, so that it does not hide the
  /// cause. On one rank.
  void write_error(const std::string& text) const noexcept;
  /// The same for lost ranks. Every rank that has noticed them calls it before it ends the job. Waits
  /// RanksMissing::report_delay() first: the first rank to write ends the job, so only one writes.
  void write_error(const Communicator& world, const comm::RanksMissing& lost) const noexcept;

 private:
  void check_shared(const Communicator& world) const;

  std::filesystem::path path_;
  std::string name_;
  std::string how_to_go_on_;
  std::vector<std::filesystem::path>
      earlier_runs_;  ///< paths of the runs of the launch's earlier trainers under the same --name
  bool made_storage_ = false;
  Json params_;
  bool is_restart_ = false;
  std::optional<RunLock> lock_;
};

}  // namespace muster::detail::run
