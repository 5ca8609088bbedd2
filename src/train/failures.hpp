// The failures of a run since it last made progress, and what they allow: of jobs, which `muster run` starts again, and
// of attempts inside one. Both count here.
//
// Progress is a checkpoint. A failure is the first one again if the newest checkpoint is newer than it was at the
// failure before: whatever the run did in between will not be done over.
#pragma once

#include "muster/error.hpp"

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>

namespace muster::detail::train {

struct Failures {
  int count = 0;
  int newest = -1;  ///< index of the newest checkpoint at the last one; -1: there was none

  /// One more, while that checkpoint is the newest.
  Failures after(int newest_now) const noexcept { return {newest_now > newest ? 1 : count + 1, newest_now}; }
  /// Whether FailureConfig::max_failures, or --max-failures, lets it be tried again. -1 always does.
  bool may_retry(int max_failures) const noexcept { return max_failures < 0 || count <= max_failures; }
};

/// Whether trying again may help after that end: not where the same flags, files and data end in the same way.
bool may_help(ExitCode code) noexcept;

/// How long to wait before the job is started again: the first time not at all, then 1, 2, 4 … s, at most a minute.
std::chrono::seconds back_off(const Failures& failures) noexcept;

/// The index of the newest checkpoint in the run's folder; -1 if there is none.
int newest_index(const std::filesystem::path& run);

/// `before` and one more, by the progress in the run's folder: its checkpoints, or what stands for them in a sweep's.
/// Where that cannot be read there was none.
Failures one_more(const Failures& before, const std::filesystem::path& run,
                  int (*progress)(const std::filesystem::path&) = newest_index);

/// What `.failures.json` in the run's folder says to the `muster run` of that id; none if that was not there before.
std::optional<Failures> read_failures(const std::filesystem::path& run, const std::string& supervisor);
/// A run has one such file, that of the last `muster run`.
void write_failures(const std::filesystem::path& run, const std::string& supervisor, const Failures& failures);

}  // namespace muster::detail::train
