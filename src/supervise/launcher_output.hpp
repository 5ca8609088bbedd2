// Reads the stderr of a launcher. It passes on the ranks' output. It removes what the launcher says about the ranks'
// end, and what the ranks tell their supervisor, and keeps these facts for the supervisor's report.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::supervise {

/// A rank that was ended by a signal, as the launcher has reported.
struct LostRank {
  int rank = 0;  ///< negative if unknown
  std::string host = {};
  int signal = 0;
};

/// The process of a rank. Ranks tell it if their launcher reports lost ranks by their processes.
struct RankProcess {
  int rank = 0;
  int pid = 0;
  std::string host = {};
};

/// What the output of one start has told. Many members, since the ranks and the launchers tell these facts in any
/// order, and each fact may be missing.
struct LauncherReport {
  bool loaded = false;                     ///< a rank has loaded muster's library
  bool starting = false;                   ///< a rank initialises MPI and waits for the other ranks there
  bool up = false;                         ///< the ranks have come together
  std::optional<int> leaving = {};         ///< the exit code of the first rank that has ended the job
  std::optional<std::string> silent = {};  ///< a host whose ranks do not answer the other ranks
  std::string run = {};                    ///< the folder of the run
  std::optional<int> min_workers = {};     ///< the least number of workers that the program needs
  /// The number of ranks that the saved state requires, if the start had another number.
  std::optional<int> required_ranks = {};
  bool preempted = false;                     ///< Slurm has preempted the job or lost its node
  std::string error = {};                     ///< the first error that a rank has printed
  bool has_error_file = false;                ///< the ranks have written error.txt into the run's folder
  std::optional<int> returned_code = {};      ///< what Launch::run() has returned to the program, on all ranks
  bool exited_improperly = false;             ///< a rank has exited without MPI_Finalize
  bool ended = false;                         ///< every rank has also finished what came after run()
  bool stopped = false;                       ///< the job has stopped on request without anything to save
  std::optional<LostRank> lost_rank = {};     ///< the first rank that was lost
  std::optional<int> failed_rank = {};        ///< the first rank that has ended with a code other than 0
  std::string failed_host = {};               ///< the host of the failed rank, if known
  int told_code = 0;                          ///< the exit code of the failed rank, if it has told it
  std::optional<int> exit_code = {};          ///< the exit code of the failed rank, if the launcher has reported it
  std::string launcher_error = {};            ///< why the launcher could not start the ranks, or has lost them
  std::optional<std::string> lost_host = {};  ///< the host that the launcher has lost or could not reach
  bool step_cancelled = false;                ///< Slurm has ended the ranks before they had ended by themselves
  bool slurm_away = false;                    ///< srun could not reach Slurm's controller
  std::string slurm = {};                     ///< the last line from Slurm about anything else
  std::set<std::string> shown_of_slurm = {};  ///< lines from Slurm that were shown; Slurm repeats some
  std::vector<RankProcess> processes = {};    ///< the processes that ranks have told
  /// A host that ssh could not reach, and ssh's message. It only matters if the launcher then reports that it could not
  /// start.
  std::string unreachable = {}, unreachable_text = {};
  bool no_program = false;  ///< the system cannot execute the program, so no start can

  /// Keeps the first error.
  void keep_error(const std::string& error) {
    if (launcher_error.empty()) launcher_error = error;
  }
  /// Records a lost host. The error is `error` followed by the host's name.
  void lose_host(const std::string& host, const std::string& error) {
    lost_host = host;
    keep_error(error + host);
  }
};

class LauncherOutput {
 public:
  LauncherOutput() : report_(own_) {}
  /// For the launcher's stdout: adds to the report of its stderr.
  explicit LauncherOutput(LauncherReport& report) : report_(report) {}
  LauncherOutput(const LauncherOutput&) = delete;
  LauncherOutput& operator=(const LauncherOutput&) = delete;

  /// Takes bytes that were read. Returns what to show of the output now, which may end in the middle of a line.
  std::string take(std::string_view bytes);
  /// Returns what is left to show when the output has ended.
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
  std::string line_;        ///< the incomplete line, as far as it is not shown yet
  bool showing_ = false;    ///< true if the incomplete line is being shown, since it is not for this process
  std::size_t dashes_ = 0;  ///< number of dashes at the end of the shown line so far
  std::string opening_;     ///< the rule above a launcher's message; empty if it was shown
  std::string block_;       ///< the text of that message so far
  bool in_block_ = false;
  bool after_message_ = false;  ///< true for the first byte after a message
};

}  // namespace muster::detail::supervise
