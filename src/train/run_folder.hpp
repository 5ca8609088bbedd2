// The folder of a run: its name, the job that has it, params.json and error.txt.
#pragma once

#include "comm/agreement.hpp"
#include "muster/communicator.hpp"
#include "muster/config.hpp"
#include "muster/launch.hpp"
#include "train/run_lock.hpp"

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::train {

/// Throws an Error (ExitCode::usage) unless `name` is one plain folder name.
void check_run_name(const std::string& name);

/// The path from the root on, without a slash at its end, which would hide its last name.
std::filesystem::path whole_path(const std::filesystem::path& path);

/// STORAGE/NAME, locked by this job while this lives. The same on every rank; rank 0 writes.
class RunFolder {
 public:
  /// Chooses the name (flag, then RunConfig, then program and Slurm job or time; a start in a Slurm job has a name of
  /// its own, unless Slurm has queued the job again or `muster run` has started it again), makes the folder, locks it
  /// (an Error if another job has it, or if the flag names a run that another program has made), makes sure that every
  /// node sees the same storage, and removes what an interrupted job has left of files that it was writing. `trainer`:
  /// its number in the launch (Launch::number_trainer), which is added to the flag's name from the second on.
  /// Collective over the world.
  RunFolder(const Communicator& world, const Launch& launch, const RunConfig& config, int trainer = 1);

  /// An Error (ExitCode::usage) if the folder was moved away under the job and another one is there. By rank 0.
  void require_own() const;
  /// Gives up the lock: others may have the folder, and this is read alone. On every rank.
  void release() noexcept { lock_.reset(); }
  /// Gives up the lock and removes the folder, unless it holds more than the notes that every run makes; and the
  /// storage, where it was made for this run and is empty. Collective over the world.
  void remove_unless_it_holds_more(const Communicator& world);

  const std::filesystem::path& path() const noexcept { return path_; }
  const std::string& name() const noexcept { return name_; }

  /// Whether --resume, which is about the run that --name names, says nothing of this one: it is a later trainer's,
  /// and `path` lies in an earlier one's.
  bool is_of_an_earlier_trainer(const std::filesystem::path& path) const;
  /// Whether this run is the first of those with the name of --name.
  bool is_first() const noexcept { return earlier_.empty(); }

  /// Whether a start of the same `muster run` has had it before.
  bool started_again() const noexcept { return started_again_; }
  /// What params.json says, on every rank as it was before this job; null for a new run.
  const Json& params() const noexcept { return params_; }
  /// Replaces params.json. By one rank.
  void write_params(Json params);
  /// Says in it that training is done, and what it has returned; it is done whether that can be written or not. By the
  /// same rank.
  void mark_finished(const Json& returned) noexcept;
  /// Restores params.json as it was before a start that was refused and has changed nothing else. A finished run has no
  /// error.txt. By the same rank.
  void put_back(Json params) noexcept;
  /// Removes error.txt where what it says is over: training begins, or has been stopped on request. By one rank.
  void clear_error() const noexcept;
  /// error.txt holds the root cause of the last failure. By one rank. What cannot be written is a warning: no trouble
  /// with a file takes the place of the cause.
  void write_error(const std::string& text) const noexcept;
  /// On every rank that sees that some do not answer, before it ends the job: the first to speak writes.
  void write_error(const Communicator& world, const comm::Lost& lost) const noexcept;

 private:
  void check_shared(const Communicator& world) const;

  std::filesystem::path path_;
  std::string name_;
  std::vector<std::filesystem::path> earlier_;  ///< runs of the launch's earlier trainers under the same --name
  bool made_storage_ = false;
  Json params_;
  bool started_again_ = false;
  std::optional<RunLock> lock_;
};

}  // namespace muster::detail::train
