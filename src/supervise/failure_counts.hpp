// Counts the failures of a job over its starts, and finds the limits in the run's options.
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
  /// `max_failures`: --max-failures; if it was not given, the run's options have the limits. `supervisor`: the ID of
  /// this `muster run`.
  FailureCounts(std::optional<int> max_failures, std::string supervisor, Terminal& terminal)
      : max_failures_(max_failures), supervisor_(std::move(supervisor)), terminal_(terminal) {}

  /// Counts one more end of the job, for which is_failure() is true. The job itself may have counted failures in the
  /// run's folder; these are taken over. Sets in `requirements` the limit for ends of this kind.
  void add(const JobEnd& end, const std::filesystem::path& run, JobRequirements& requirements);
  /// Returns the counted failures of the same kind as `end`: preemptions or other failures.
  const run::Failures& like(const JobEnd& end) const { return is_preemption(end) ? preemptions_ : failures_; }
  /// True if there was a checkpoint at one of the counted ends.
  bool had_checkpoint() const { return !failures_.furthest.empty() || !preemptions_.furthest.empty(); }

 private:
  std::optional<int> max_failures_;
  std::string supervisor_;
  Terminal& terminal_;
  run::Failures failures_;  ///< without the preemptions
  run::Failures preemptions_;
};

}  // namespace muster::detail::supervise
