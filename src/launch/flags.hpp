// The flags that every program has: declared for its command line, read on every rank, agreed, resolved.
#pragma once

#include "muster/communicator.hpp"
#include "muster/launch.hpp"

#include <CLI/CLI.hpp>

#include <optional>
#include <string>

namespace muster::detail::launch {

class Flags {
 public:
  /// `version` is what --version says of the program; it may be empty.
  Flags(const std::string& program, const std::string& version);

  /// Takes the program's own options, before parse().
  CLI::App app;

  /// Reads this rank's command line and environment, and agrees with the others on the flags. False where a rank was
  /// asked for its help or version, which rank 0 has then shown. Collective.
  bool parse(const Communicator& world, int argc, char** argv);
  /// After parse(); an Error (ExitCode::usage) for a value that cannot be.
  LaunchFlags resolve() const;
  /// The level from which on messages are shown.
  const std::string& log_level() const noexcept { return log_level_; }

 private:
  /// This rank's values of the flags that all ranks have alike, packed; or help_, where that is asked for.
  std::string read(int argc, char** argv);

  std::optional<std::string> help_;
  std::vector<std::string> set_;
  std::string resume_ = "auto", progress_ = "auto", log_level_ = "info", time_limit_, backend_, storage_, name_,
              config_;
  std::uint64_t seed_ = 0;
  double timeout_ = 0;
  int workers_ = 0, threads_ = 0;
};

}  // namespace muster::detail::launch
