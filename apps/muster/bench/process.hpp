// Runs programs to their end.
#pragma once

#include <nlohmann/json.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace muster::bench {

using Clock = std::chrono::steady_clock;

struct Command {
  std::vector<std::string> words;  ///< the program, which is searched in PATH if it has no slash, and its arguments
  std::vector<std::pair<std::string, std::string>> environment = {};  ///< added to this process's environment
  Clock::time_point deadline = Clock::time_point::max();
  bool quiet = true;  ///< true if stderr is not shown but kept for the text of an error
  std::function<void(const std::string&)> on_line =
      {};  ///< called with each line of stdout as it comes, instead of keeping stdout
};

enum class End { itself, deadline, interrupt };

struct Finished {
  End end = End::itself;  ///< why it has ended: by itself, at the deadline, or since a signal has stopped this program
  int code = 0;           ///< exit code; 128 + signal number if a signal has ended it
  std::string out;        ///< stdout; with Command::on_line, only what follows its last complete line
  std::string err;        ///< stderr, if the command is quiet
  Clock::time_point begin;
};

/// How long a program may take to end after it was asked to; then it is killed.
inline constexpr std::chrono::seconds time_to_end{5};

/// Runs the command to its end in a process group of its own. It is ended at the deadline, or when a signal stops this
/// program. Afterwards none of its processes is left.
Finished run(const Command& command);

/// Parses as JSON the last line that a benchmark's program has printed. Throws an Error with the cause if the program
/// has failed or was not finished in time.
nlohmann::ordered_json result_of(const std::string& doing, const Finished& finished);

}  // namespace muster::bench
