// The flags that every program has: their declaration, and how they are read, compared between the ranks and resolved.
#pragma once

#include "muster/communicator.hpp"
#include "muster/launch.hpp"

#include <CLI/CLI.hpp>

#include <chrono>
#include <optional>
#include <string>

namespace muster::detail::launch {

/// This rank's --timeout or MUSTER_TIMEOUT, for the waits before Flags::parse(). Empty if it is not given or not valid;
/// parse() throws the Error for a value that is not valid.
std::optional<std::chrono::milliseconds> timeout_at_start(int argc, const char* const* argv);

/// Parses the flags of a launch, compares them between the ranks, and resolves them.
class Flags {
 public:
  /// `version`: the program's version for --version; may be empty.
  Flags(int argc, char** argv, const std::string& version);

  /// The parser. Programs add their own options to it before parse().
  CLI::App app;

  /// Reads this rank's command line and environment, and makes sure that all flags except --threads and --log-level
  /// have the same value on all ranks. Throws an Error (ExitCode::usage) for an invalid value, or if the ranks' values
  /// differ. False if help or version was requested on any rank; rank 0 has printed it if it was requested there.
  /// Collective.
  bool parse(const Communicator& world);
  /// Returns the flags. Call it after parse(). Warns of MUSTER_SET, which nothing reads, and of MUSTER_… variables that
  /// seem to be misspelt.
  LaunchFlags resolve() const;
  /// The program's name without its folder.
  const std::string& program() const noexcept { return program_; }
  /// The lowest level of messages that are logged.
  const std::string& log_level() const noexcept { return log_level_; }

 private:
  /// Parses this rank's command line. Returns, as bytes, the rank's values of the flags that all ranks must share. If
  /// help or version is requested, sets help_ and returns no values.
  std::string read();

  const int argc_;
  char** const argv_;
  const std::string program_;
  std::optional<std::string> help_;
  std::vector<std::string> set_, config_;
  std::string resume_ = "auto", progress_ = "auto", log_level_ = "info", bind_ = "auto", time_limit_, backend_,
              storage_, name_, profile_;
  std::uint64_t seed_ = 0;
  double timeout_ = 0;
  int workers_ = 0, threads_ = 0;
  bool tensorboard_ = false, profile_operators_ = false;
};

}  // namespace muster::detail::launch
