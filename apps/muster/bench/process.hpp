// Runs programs and waits for their end.
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
  std::vector<std::string> words;  ///< the program, searched in PATH if it has no slash, and its arguments
  std::vector<std::pair<std::string, std::string>> environment = {};  ///< added to this process's environment
  Clock::time_point deadline = Clock::time_point::max();
  bool quiet = true;  ///< its stderr is not shown, but kept for the text of an error
  std::function<void(const std::string&)> on_line =
      {};  ///< given each line of its stdout at once, instead of keeping it
};

enum class End { itself, deadline, interrupt };

struct Finished {
  End end = End::itself;  ///< what has ended it: deadline and interrupt are of this program
  int code = 0;           ///< exit code; 128 + the signal's number if a signal ended it
  std::string out;        ///< its stdout
  std::string err;        ///< its stderr if the command was quiet
  Clock::time_point begin;
};

/// Ending a program may take so long: it is asked to, and killed then.
inline constexpr std::chrono::seconds time_to_end{5};

/// Runs the command to its end in its own process group. It is ended at the deadline, and when a signal stops this
/// program. No process of it is left afterwards.
Finished run(const Command& command);

/// Parses the last line that a benchmark's program has printed, as JSON. Throws an Error with the
/// cause if the program failed or did not end in time.
nlohmann::ordered_json result_of(const std::string& doing, const Finished& finished);

}  // namespace muster::bench
