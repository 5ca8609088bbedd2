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

/// Throws an Error (ExitCode::usage) if `name` is not the plain name of a folder, or begins with "checkpoint_".
void check_run_name(const std::string& name);

/// Returns the run's seed: that of --seed, else that of params.json, else 0. `params`: null for a new run.
MUSTER_INTERNAL_API std::uint64_t seed_of(const LaunchFlags& flags, const Json& params);

/// Returns the absolute path, without a slash at its end, so that filename() returns its last part. Throws an Error
/// (ExitCode::usage) if `path` is empty.
MUSTER_INTERNAL_API std::filesystem::path absolute_path(const std::filesystem::path& path);

/// The folder STORAGE/NAME. This job holds its lock until release(), or as long as the object lives. All ranks have the
/// same path; rank 0 writes the files.
class MUSTER_INTERNAL_API RunFolder {
 public:
  /// Chooses the name: that of --name, else RunConfig's, else program and Slurm job or time. Without a given name, each
  /// start in a Slurm job gets a name of its own, unless Slurm has requeued the job or `muster run` has restarted it.
  /// Then makes the folder, locks it, checks that every node sees the same storage, opens the log files, and removes
  /// unfinished files of an interrupted job. `trainer`: the trainer's number in the launch
  /// (Launch::next_trainer_number); from the second trainer on, the number is appended to the name of --name, unless
  /// RunConfig has the same name. Throws an Error if another job uses the folder, or if --name names a run of another
  /// program. Collective over the world.
  RunFolder(const Communicator& world, const Launch& launch, const RunConfig& config, int trainer = 1);

  /// Throws an Error (ExitCode::usage) if, while the job runs, the folder was moved away or removed, or its .lock was
  /// removed and another job may have the folder. Call it on rank 0.
  void require_not_replaced() const;
  /// Gives up the lock: other jobs may use the folder, and this job may only read it. Call it on every rank.
  void release() noexcept { lock_.reset(); }
  /// Gives up the lock and removes the folder if it only has the files that every run writes. If this run has made the
  /// storage folder and it is empty, removes it, too. Collective over the world.
  void remove_if_unused(const Communicator& world);

  const std::filesystem::path& path() const noexcept { return path_; }
  const std::string& name() const noexcept { return name_; }
  /// Returns "Start it again with --name NAME to go on", a remedy for a program that was stopped. NAME is the name of
  /// the program's first run, from which the names of its later runs follow. If the program itself gives the name, the
  /// text is "Start it again to go on".
  const std::string& how_to_go_on() const noexcept { return how_to_go_on_; }

  /// True if `path` lies in the run of an earlier trainer of this launch with the same --name. Then --resume `path` is
  /// not meant for this run.
  bool is_in_run_of_earlier_trainer(const std::filesystem::path& path) const;
  /// True unless an earlier trainer of the launch has a run with the same --name.
  bool is_first_trainer() const noexcept { return earlier_runs_.empty(); }

  /// True if an earlier start of the same `muster run` has used this folder.
  bool is_restart() const noexcept { return is_restart_; }
  /// The contents of params.json; null for a new run. On ranks that have not written it, the contents when this job
  /// began.
  const Json& params() const noexcept { return params_; }
  /// Replaces params.json. Call it on one rank.
  void write_params(Json params);
  /// Removes error.txt, and records in params.json that training is finished and the training function's return value.
  /// If that fails, logs a warning. Call it on the rank that calls write_params().
  void mark_finished(const Json& returned) noexcept;
  /// Writes `params` back to params.json after a start that was refused and has changed nothing else. If that fails,
  /// logs a warning. Call it on the rank that calls write_params().
  void restore_params(Json params) noexcept;
  /// Removes error.txt. Call it on one rank.
  void clear_error() const noexcept;
  /// Writes the root cause of a failure to error.txt. If that fails, only logs a warning, so that the cause is not
  /// hidden. Call it on one rank.
  void write_error(const std::string& text) const noexcept;
  /// Writes error.txt when ranks were lost. Each rank that notices lost ranks calls it before it ends the job. It first
  /// waits for RanksMissing::report_delay(), which differs between ranks: the first rank that writes ends the job, so
  /// only one rank writes.
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
