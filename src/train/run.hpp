// A run's directory: its name, who holds it, what it says of itself.
#pragma once

#include "base/file.hpp"
#include "comm/agreement.hpp"
#include "muster/communicator.hpp"
#include "muster/config.hpp"
#include "muster/launch.hpp"

#include <filesystem>
#include <optional>
#include <string>

namespace muster::detail::train {

/// Throws an Error (ExitCode::usage) unless `name` is one plain folder name.
void check_run_name(const std::string& name);

/// STORAGE/NAME, held by this job until it is destroyed. The same on every rank; rank 0 writes.
class Run {
 public:
  /// Chooses the name (flag, then RunConfig, then program and Slurm job or time), makes the folder, takes it (an Error
  /// if another job has it), and makes sure that every node sees the same storage. Collective over the world.
  Run(const Communicator& world, const Launch& launch, const RunConfig& config);

  const std::filesystem::path& path() const noexcept { return path_; }
  const std::string& name() const noexcept { return name_; }

  /// What params.json said before this job; null for a new run.
  const Json& previous_params() const noexcept { return previous_; }
  /// Replaces params.json. By one rank.
  void write_params(const Json& params) const;
  /// error.txt holds the root cause of the last failure. By one rank. What cannot be written is a warning: no trouble
  /// with a file takes the place of the cause.
  void write_error(const std::string& text) const noexcept;
  /// On every rank that sees that some do not answer, before it ends the job: the lowest of them writes.
  void write_error(const Communicator& world, const comm::Lost& lost) const noexcept;
  void remove_error() const noexcept;

 private:
  void take();
  void check_shared(const Communicator& world) const;

  bool root_ = false;
  std::filesystem::path path_;
  std::string name_;
  Json previous_;
  std::optional<File> lock_;
};

}  // namespace muster::detail::train
