// Counts the failures of a run since its last progress, and decides if it may be tried again. It counts failures of
// jobs, which `muster run` restarts, and of attempts inside a job.
//
// Progress is a new checkpoint. If the newest checkpoint is newer than at the last failure, the count begins again.
#pragma once

#include "muster/error.hpp"

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>

namespace muster::detail::train {

struct Failures {
  int count = 0;
  int newest = -1;  ///< index of the newest checkpoint at the last failure; -1 if there was none

  /// The failures after one more, at which the newest checkpoint is `newest_now`.
  Failures after(int newest_now) const noexcept { return {newest_now > newest ? 1 : count + 1, newest_now}; }
  /// True if FailureConfig::max_failures, or --max-failures, allows another try. -1 always does.
  bool may_retry(int max_failures) const noexcept { return max_failures < 0 || count <= max_failures; }
};

/// True if trying again may help. False if the same flags, files and data would end in the same way.
bool may_help(ExitCode code) noexcept;

/// How long to wait before the next try: 0 s after the first failure, then 1, 2, 4 … s, at most a minute.
std::chrono::seconds back_off(const Failures& failures) noexcept;

/// The index of the newest checkpoint in the run's folder; -1 if there is none.
int newest_index(const std::filesystem::path& run);

/// Adds a failure to `before`. `progress` reads the progress from the run's folder: the newest checkpoint's index, or
/// its counterpart for a sweep. If it throws, there was no progress.
Failures one_more(const Failures& before, const std::filesystem::path& run,
                  int (*progress)(const std::filesystem::path&) = newest_index);

/// The failures in `.failures.json` of the run's folder; none if the `muster run` with the id `supervisor` did not
/// write it.
std::optional<Failures> read_failures(const std::filesystem::path& run, const std::string& supervisor);
/// Writes that file. A run has only one, of the last `muster run`.
void write_failures(const std::filesystem::path& run, const std::string& supervisor, const Failures& failures);

}  // namespace muster::detail::train
