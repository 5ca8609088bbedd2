// Reads the stderr of a launcher. Output of the ranks is passed on. What the launcher says about their end, and what
// they tell their supervisor, is kept for the supervisor's report.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace muster::detail::supervise {

/// A rank that was ended by a signal, as reported by the launcher.
struct LostRank {
  int rank = 0;
  std::string host = {};
  int signal = 0;
};

/// What was learned from the output of one start.
struct Words {
  std::string run = {};                  ///< the run's folder
  std::optional<int> least = {};         ///< the least number of workers that the program accepts
  std::optional<int> needed = {};        ///< the number of ranks that the saved state requires, if it differed
  bool preempted = false;                ///< Slurm reports that it preempted the job or lost its node
  std::string error = {};                ///< the first error that a rank printed
  bool cause_kept = false;               ///< the ranks have written error.txt into the run's folder
  std::optional<int> ended = {};         ///< every rank finished its work, and the job was to end with this code
  bool stopped = false;                  ///< it stopped on request, and there was nothing to save
  std::optional<LostRank> lost = {};     ///< the first lost rank
  std::optional<int> failed_rank = {};   ///< the first rank that ended with a code other than 0
  std::string launcher = {};             ///< why the launcher could not start the ranks, or lost them
  std::optional<std::string> host = {};  ///< the host that it lost or could not reach
  bool no_program = false;               ///< the system cannot execute the program, in any start
};

class LauncherOutput {
 public:
  /// Takes bytes that were read; returns what to show of them now, including unfinished lines.
  std::string take(std::string_view bytes);
  /// Returns what is left to show at the end.
  std::string finish();

  const Words& words() const noexcept { return words_; }

 private:
  std::string take_line(const std::string& line);
  std::string take_block_line(const std::string& line);
  std::string shown_of(const std::string& line);
  bool keep(std::string_view line);
  void keep_unreachable(std::string_view line);
  void keep_block();

  /// A host that ssh could not reach. It counts only if mpirun then says that it could not start.
  struct Unreachable {
    std::string host, said;
  };

  Words words_;
  std::optional<Unreachable> unreachable_;
  std::string line_;        ///< the unfinished line, not shown yet
  bool showing_ = false;    ///< true if the unfinished line is shown, since it is not for us
  std::size_t dashes_ = 0;  ///< the number of dashes at its end so far
  std::string opening_;     ///< the line of dashes above a message of the launcher; empty if it has been shown
  std::string block_;       ///< the text of that message
  bool in_block_ = false;
};

}  // namespace muster::detail::supervise
