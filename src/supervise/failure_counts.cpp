#include "supervise/failure_counts.hpp"

#include "base/json.hpp"
#include "base/run_names.hpp"
#include "muster/config.hpp"
#include "muster/error.hpp"
#include "sweep/progress.hpp"

#include <exception>

namespace muster::detail::supervise {
namespace {

namespace fs = std::filesystem;

/// Returns a limit in the options that the run has saved; in a sweep, that its first trial has saved. Empty if there is
/// none.
std::optional<int> saved_limit(const fs::path& run, const char* limit) {
  for (const auto& folder : {run, run / sweep::first_trial}) try {
      return read_json(folder / run_names::params).at("run_config").at(limit).get<int>();
    } catch (const std::exception&) {
    }
  return {};
}

/// Returns a limit of the run's FailureConfig; its default if the run has saved none.
int configured_limit(const fs::path& run, const char* limit) {
  return saved_limit(run, limit).value_or(Json(FailureConfig{}).at(limit).get<int>());
}

/// Returns the limit that holds after an end with this exit code: an operator's train() has a limit of its own for lost
/// ranks.
int max_failures(const fs::path& run, int code) {
  const auto retries = code == static_cast<int>(ExitCode::retry) ? saved_limit(run, "max_retries") : std::nullopt;
  return retries ? *retries : configured_limit(run, "max_failures");
}

}  // namespace

void FailureCounts::add(const JobEnd& end, const fs::path& run, JobRequirements& requirements) {
  if (is_preemption(end)) {
    requirements.max_preemptions = configured_limit(run, "max_preemption_failures");
    preemptions_ = run::add_failure(preemptions_, run, sweep::progress);
    return;
  }
  requirements.max_failures = max_failures_ ? *max_failures_ : max_failures(run, exit_code_of(end));
  if (run.empty()) {
    failures_ = failures_.with_one_more({});
    return;
  }
  auto before = run::read_failures(run, supervisor_).value_or(failures_);
  auto known = failures_.furthest;  // kept, since a run that follows a sweep in the same job has no points of trials
  before.furthest.merge(known);
  failures_ = run::add_failure(before, run, sweep::progress);
  try {
    run::write_failures(run, supervisor_, failures_);
  } catch (const std::exception& error) {
    terminal_.warn(std::string("the number of failures is not kept in the run's folder: ") + error.what());
  }
}

}  // namespace muster::detail::supervise
