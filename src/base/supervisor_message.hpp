// Lines on stderr that a rank writes for the `muster run` that has started it. Nobody else sees them.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace muster::detail {

/// In the environment of a supervised rank.
inline constexpr const char* supervised_variable = "MUSTER_SUPERVISED";
/// In that of its children: the process id of the rank, the first of its processes that has loaded the library.
inline constexpr const char* rank_process_variable = "MUSTER_RANK_PROCESS";

/// What such a line begins with. A word, a space and a text without line breaks follow.
inline constexpr std::string_view message_prefix = "\x1emuster ";
inline constexpr std::string_view message_loaded = "loaded";  ///< the library, in a rank or a program that it starts
inline constexpr std::string_view message_starting = "starting";  ///< this rank initialises MPI
inline constexpr std::string_view message_leaving = "leaving";    ///< the exit code: this rank ends the job now
/// "RANK CODE HOST": this rank itself exits with a code other than 0; not under srun, which tells it.
inline constexpr std::string_view message_exit = "exit";
inline constexpr std::string_view message_silent = "silent";  ///< a host on which no rank answers

/// True in a job of Slurm, PBS or LSF. They send SIGTERM to all processes of a job that they are about to end.
inline bool in_batch_job() noexcept {
  return std::getenv("SLURM_JOB_ID") != nullptr || std::getenv("PBS_JOBID") != nullptr ||
         std::getenv("LSB_JOBID") != nullptr;
}

/// Writes the line, if a `muster run` reads it.
inline void tell(std::string_view word, std::string_view text) noexcept {
  if (std::getenv(supervised_variable) == nullptr) return;
  std::string line(message_prefix);
  line.append(word).append(" ").append(text).append("\n");
  // One write, so that no other output comes between. A line may be lost; the supervisor does not rely on any.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace muster::detail
