// Lines that a rank writes to stderr for the `muster run` that has started it, which does not show them to the user.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace muster::detail {

/// An environment variable that `muster run` sets for its ranks.
inline constexpr const char* supervised_variable = "MUSTER_SUPERVISED";
/// An environment variable that a rank sets for its child processes: the rank's process id.
inline constexpr const char* rank_process_variable = "MUSTER_RANK_PROCESS";

/// The beginning of each line. After it come one of the words below, a space and a text without line breaks.
inline constexpr std::string_view message_prefix = "\x1emuster ";
inline constexpr std::string_view message_loaded = "loaded";      ///< the library is loaded, in a rank or its child
inline constexpr std::string_view message_starting = "starting";  ///< this rank initialises MPI
inline constexpr std::string_view message_leaving = "leaving";    ///< this rank ends the job; the text is the exit code
/// "RANK CODE HOST": this rank itself exits with a code other than 0. Not sent under srun, which reports exit codes.
inline constexpr std::string_view message_exit = "exit";
inline constexpr std::string_view message_silent = "silent";  ///< no rank answers on the host that the text names

/// True in a job of Slurm, PBS or LSF. They send SIGTERM to all processes of a job that they are about to end.
inline bool in_batch_job() noexcept {
  return std::getenv("SLURM_JOB_ID") != nullptr || std::getenv("PBS_JOBID") != nullptr ||
         std::getenv("LSB_JOBID") != nullptr;
}

/// Writes a line with this word and text to stderr, if `muster run` has started this process.
inline void tell(std::string_view word, std::string_view text) noexcept {
  if (std::getenv(supervised_variable) == nullptr) return;
  std::string line(message_prefix);
  line.append(word).append(" ").append(text).append("\n");
  // One write, so that no other output comes between. A line may be lost; `muster run` does not rely on any.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace muster::detail
