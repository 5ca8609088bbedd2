// The output of a short program, such as scontrol, with a limit for its time.
#pragma once

#include "base/export.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail {

struct ProgramEnd {
  enum class Kind { exited, killed_by_signal, out_of_time, not_started };
  Kind kind = Kind::not_started;
  int code = -1;       ///< the exit code, or the number of the signal
  std::string output;  ///< of standard output
  bool succeeded() const noexcept { return kind == Kind::exited && code == 0; }
};

/// Runs the program, searched in PATH, without input, and waits for its end. Kills it, and what it has started, if its
/// output does not end within `limit`. With `errors`, the output includes standard error.
MUSTER_INTERNAL_API ProgramEnd run_program(std::vector<std::string> words, std::chrono::milliseconds limit,
                                           bool errors = false);
/// What the program has written to standard output; none unless it has succeeded within `limit`.
MUSTER_INTERNAL_API std::optional<std::string> output_of(std::vector<std::string> words,
                                                         std::chrono::milliseconds limit);

}  // namespace muster::detail
