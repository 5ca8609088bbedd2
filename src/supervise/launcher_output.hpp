// Reads the stderr of a launcher. Output of the ranks is passed on. What the launcher says about their end, and what
// they tell their supervisor, is kept for the supervisor's report.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::supervise {

/// A rank that was ended by a signal, as reported by the launcher.
struct LostRank {
  int rank = 0;  ///< negative if it is not known
  std::string host = {};
  int signal = 0;
};

/// A rank's process, as the rank tells where its launcher names lost ranks by their process.
struct RankProcess {
  int rank = 0;
  int pid = 0;
  std::string host = {};
};

/// What was learned from the output of one start. Many members, since the ranks and the launchers tell these facts in
/// any order, and each of them may be missing.
struct LauncherReport {
  bool loaded = false;                        ///< a rank has loaded muster's library
  bool starting = false;                      ///< a rank initialises MPI, and waits for the others there
  bool up = false;                            ///< the ranks have come together
  std::optional<int> leaving = {};            ///< the exit code with which the first rank has ended the job
  std::optional<std::string> silent = {};     ///< a host on which no rank has answered the others
  std::string run = {};                       ///< the folder of the run
  std::optional<int> min_workers = {};        ///< the workers that are enough
  std::optional<int> required_ranks = {};     ///< the ranks that the saved state takes, which were others
  bool preempted = false;                     ///< Slurm says that it has taken the place for others, or lost it
  std::string error = {};                     ///< the first error that a rank has printed
  bool has_error_file = false;                ///< the ranks have written error.txt into the run's folder
  std::optional<int> returned_code = {};      ///< that Launch::run() has returned to the program, on all ranks
  bool exited_improperly = false;             ///< a rank, without MPI_Finalize
  bool ended = false;                         ///< every rank is also through what came after run()
  bool stopped = false;                       ///< on request, and there was nothing to save
  std::optional<LostRank> lost_rank = {};     ///< the first one
  std::optional<int> failed_rank = {};        ///< the first one that ended with a code other than 0
  std::string failed_host = {};               ///< its host, where it is known
  std::optional<int> exit_code = {};          ///< of that rank, where the launcher says it
  std::string launcher_error = {};            ///< why the launcher could not start the ranks, or lost them
  std::optional<std::string> lost_host = {};  ///< that it has lost or could not reach
  bool step_cancelled = false;                ///< Slurm has ended the ranks before they had ended
  bool slurm_away = false;                    ///< srun could not reach Slurm's controller
  std::string slurm = {};                     ///< the last line of Slurm's that is about something else
  std::set<std::string> shown_of_slurm = {};  ///< lines of Slurm's, which repeats some
  std::vector<RankProcess> processes = {};    ///< those that have told
  /// A host that ssh could not reach, and what ssh has said. It counts only if the launcher then says that it could not
  /// start.
  std::string unreachable = {}, unreachable_text = {};
  bool no_program = false;  ///< the system cannot execute the program, at any start

  /// The first error counts.
  void keep_error(const std::string& error) {
    if (launcher_error.empty()) launcher_error = error;
  }
  /// `error` is followed by the host's name.
  void lose_host(const std::string& host, const std::string& error) {
    lost_host = host;
    keep_error(error + host);
  }
};

class LauncherOutput {
 public:
  LauncherOutput() : report_(own_) {}
  /// For the launcher's second stream: adds to the report of the first.
  explicit LauncherOutput(LauncherReport& report) : report_(report) {}
  LauncherOutput(const LauncherOutput&) = delete;
  LauncherOutput& operator=(const LauncherOutput&) = delete;

  /// Takes bytes that were read; returns what to show of them now, including unfinished lines.
  std::string take(std::string_view bytes);
  /// Returns what is left to show at the end.
  std::string finish();

  const LauncherReport& report() const noexcept { return report_; }
  LauncherReport& report() noexcept { return report_; }

 private:
  std::string take_line(const std::string& line);
  std::string take_block_line(const std::string& line);
  std::string shown_of(const std::string& line);
  bool keep(std::string_view line);
  void keep_process(const std::string& text);
  void keep_exit(const std::string& text);
  void keep_unreachable(std::string_view line);
  LauncherReport own_;
  LauncherReport& report_;
  std::string line_;        ///< the unfinished line, not shown yet
  bool showing_ = false;    ///< true if the unfinished line is shown, since it is not for us
  std::size_t dashes_ = 0;  ///< the number of dashes at its end so far
  std::string opening_;     ///< the line above a message of the launcher; empty if it has been shown
  std::string block_;       ///< the text of that message
  bool in_block_ = false;
  bool after_message_ = false;  ///< true right after it
};

}  // namespace muster::detail::supervise
