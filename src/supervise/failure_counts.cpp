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

/// A limit from the run's saved options, or in a sweep from its first trial's; empty if the run did not save any.
std::optional<int> saved_limit(const fs::path& run, const char* limit) {
  for (const auto& folder : {run, run / sweep::first_trial}) try {
      return read_json(folder / run_names::params).at("run_config").at(limit).get<int>();
    } catch (const std::exception&) {
    }
  return {};
}

/// A limit of the run's FailureConfig.
int configured_limit(const fs::path& run, const char* limit) {
  return saved_limit(run, limit).value_or(Json(FailureConfig{}).at(limit).get<int>());
}

/// The limit after an end with that code: an operator's train() has its own limit for lost ranks.
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
  auto known = failures_.furthest;  // a run that follows a sweep knows of no trials
  before.furthest.merge(known);
  failures_ = run::add_failure(before, run, sweep::progress);
  try {
    run::write_failures(run, supervisor_, failures_);
  } catch (const std::exception& error) {
    terminal_.warn(std::string("the number of failures is not kept in the run's folder: ") + error.what());
  }
}

}  // namespace muster::detail::supervise
