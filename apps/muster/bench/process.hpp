// Programs that are run and waited for.
#pragma once

#include <nlohmann/json.hpp>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace muster::bench {

struct Command {
  std::vector<std::string> words;  ///< the program, searched in PATH if it has no slash, and its arguments
  std::vector<std::pair<std::string, std::string>> environment = {};  ///< set beside what this process has
  std::chrono::seconds limit = std::chrono::hours(24);
  bool quiet = true;  ///< what it writes to stderr is kept for an error's text, and not shown
};

struct Finished {
  int code = 0;     ///< exit code; 128 and the signal's number where one ended it
  std::string out;  ///< its stdout
  std::string err;  ///< its stderr where the command was quiet
  std::chrono::steady_clock::time_point begin;
};

/// Runs it to its end in a process group of its own, of which nothing is left then. It is killed at the limit (Error,
/// ExitCode::retry) and where a signal stops this program (tool::Interrupted).
Finished run(const Command& command);

/// What a program of the benchmark printed last: a line of JSON. An Error if it failed.
nlohmann::ordered_json result_of(const std::string& doing, const Finished& finished);

/// Where a program of that name lies in PATH; empty if nowhere.
std::string find_in_path(const std::string& name);

}  // namespace muster::bench
