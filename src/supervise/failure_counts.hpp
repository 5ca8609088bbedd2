// Counts the failures of a job over its starts, and finds the limits of the run's options.
#pragma once

#include "run/failures.hpp"
#include "supervise/decision.hpp"
#include "supervise/terminal.hpp"

#include <filesystem>
#include <optional>
#include <string>
#include <utility>

namespace muster::detail::supervise {

class FailureCounts {
 public:
  /// `max_failures`: --max-failures; without it the limits are those of the run. `supervisor`: the id of this
  /// `muster run`.
  FailureCounts(std::optional<int> max_failures, std::string supervisor, Terminal& terminal)
      : max_failures_(max_failures), supervisor_(std::move(supervisor)), terminal_(terminal) {}

  /// Counts one more end of the job, which is_failure(). The job may have counted some itself, in the run's folder.
  /// Sets the limit for ends of that kind in `requirements`.
  void add(const JobEnd& end, const std::filesystem::path& run, JobRequirements& requirements);
  /// The counted failures of the same kind as `end`.
  const run::Failures& like(const JobEnd& end) const { return is_preemption(end) ? preemptions_ : failures_; }
  /// True if there was a checkpoint at some end.
  bool had_checkpoint() const { return !failures_.furthest.empty() || !preemptions_.furthest.empty(); }

 private:
  std::optional<int> max_failures_;
  std::string supervisor_;
  Terminal& terminal_;
  run::Failures failures_;  ///< without preemptions
  run::Failures preemptions_;
};

}  // namespace muster::detail::supervise
