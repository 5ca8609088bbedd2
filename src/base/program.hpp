// Finds programs in PATH, and runs short ones, such as scontrol, with a timeout.
#pragma once

#include "base/export.hpp"

#include <sys/types.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail {

/// Finds an executable file in the folders of `path`, or at `name` itself if it has a slash; empty if there is none.
MUSTER_INTERNAL_API std::filesystem::path find_program(const std::string& name, const char* path = std::getenv("PATH"));

/// The variables of this process as "NAME=VALUE", and those of `more`, which replace variables of the same names.
MUSTER_INTERNAL_API std::vector<std::string> environment_with(
    const std::vector<std::pair<std::string, std::string>>& more);
/// The strings as exec(3) takes them, with a null pointer at the end. The pointers point into `strings`.
MUSTER_INTERNAL_API std::vector<char*> pointers_to(std::vector<std::string>& strings);

/// How a program ended, and what it has printed.
struct ProgramEnd {
  enum class Kind { exited, killed_by_signal, out_of_time, not_started };
  Kind kind = Kind::not_started;
  int code = -1;       ///< the exit code, or the number of the signal; -1 for the other kinds
  std::string output;  ///< what it wrote to standard output, and to standard error if run_program() had `errors`
  bool succeeded() const noexcept { return kind == Kind::exited && code == 0; }
};

/// Starts a program, searched in PATH, without input and in a process group of its own. Its standard output goes to the
/// file descriptor `output`. So does its standard error if `errors` is true; otherwise that is discarded. Returns the
/// process id, for which the caller must wait (waitpid), or -1 if the program could not be started.
MUSTER_INTERNAL_API pid_t start_program(std::vector<std::string> words, int output, bool errors = false);

/// Runs the program, searched in PATH, without input, and waits for its end. Kills its process group if the program or
/// its output does not end within `timeout`. With `errors`, the output includes standard error.
MUSTER_INTERNAL_API ProgramEnd run_program(std::vector<std::string> words, std::chrono::milliseconds timeout,
                                           bool errors = false);
/// Runs the program like run_program(). Returns its standard output; nothing unless it ends with 0 within `timeout`.
MUSTER_INTERNAL_API std::optional<std::string> output_of(std::vector<std::string> words,
                                                         std::chrono::milliseconds timeout);

}  // namespace muster::detail
