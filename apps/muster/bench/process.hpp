// Runs programs and waits for their end.
#pragma once

#include <nlohmann/json.hpp>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace muster::bench {

struct Command {
  std::vector<std::string> words;  ///< the program, searched in PATH if it has no slash, and its arguments
  std::vector<std::pair<std::string, std::string>> environment = {};  ///< added to this process's environment
  std::chrono::seconds limit = std::chrono::hours(24);
  bool quiet = true;  ///< its stderr is not shown, but kept for the text of an error
};

struct Finished {
  int code = 0;     ///< exit code; 128 + the signal's number if a signal ended it
  std::string out;  ///< its stdout
  std::string err;  ///< its stderr if the command was quiet
  std::chrono::steady_clock::time_point begin;
};

/// Runs the command to its end in its own process group, of which no process is left afterwards. It is killed at the
/// limit (Error, ExitCode::retry), and if a signal stops this program (tool::Interrupted).
Finished run(const Command& command);

/// Parses the last line that a benchmark's program has printed, as JSON. Throws an Error if the program failed.
nlohmann::ordered_json result_of(const std::string& doing, const Finished& finished);

/// The path of a program in PATH; empty if it is not found.
std::string find_in_path(const std::string& name);

}  // namespace muster::bench
