// What an end means, and what comes after it: pure functions.
#pragma once

#include "muster/error.hpp"
#include "supervise/launcher_output.hpp"
#include "train/failures.hpp"

#include <chrono>
#include <string>

namespace muster::detail::supervise {

/// How one start of the job has ended.
struct End {
  int code = 0;             ///< the launcher's exit code
  int launcher_signal = 0;  ///< or what has ended it
  Words words = {};
  bool grace_over = false;   ///< it did not heed the wish to stop, and was ended
  bool not_up = false;       ///< its ranks did not come together within the time for that, and it was ended
  bool stop_wished = false;  ///< while it ran
  /// The job goes on without the host that was lost, or waits for it: then that is no failure of the program.
  bool host_is_excused = false;
};

/// What is asked of all starts.
struct Demand {
  int ranks = 1;
  int min_workers = 1;  ///< `ranks` where all are wanted
  int max_failures = 0;
  int max_preemptions = -1;
};

struct Next {
  bool again = false;
  int code = 0;                    ///< to end with
  std::chrono::seconds wait = {};  ///< before the next start
  int ranks = 0;                   ///< of it
};

/// The code that the job has ended with. What the ranks had agreed on before they went stands, whatever happened to
/// them or to the launcher then; a signal is a lost rank, ExitCode::retry.
int code_of(const End& end);

/// `failures` counts this end, if it is one: the preemptions or the others. `ranks` of this start: where the launcher
/// could not start so many, half of them are tried next, and all of them again after a start that ran. Where the saved
/// state takes another number of ranks, and the job may have so many, that number is started at once.
Next what_next(const End& end, const train::Failures& failures, const Demand& demand, int ranks, bool stop_wished);

/// Whether that failure is none of the program's: a host could not be reached and there are enough others, or ranks
/// that had begun their run have lost their node, or were ended by SIGTERM or by the scheduler's word.
bool is_preemption(const End& end);

/// Whether that is a failure, which is counted: no stop, however it was asked for, and nothing that trying again does
/// not change.
bool is_failure(const End& end, bool stop_wished);

/// The root cause, as far as the launcher and the ranks have said it; `in_file` is what the ranks have left in
/// error.txt, empty if nothing. "rank 1 (n2) was ended by signal 9 (Killed)".
std::string cause_of(const End& end, const std::string& in_file);

/// Where to read more: "The log of rank 1 is RUN/logs/rank_00001.log"; empty if no run is known.
std::string where_to_look(const End& end);

}  // namespace muster::detail::supervise
