// Counts the failures of a run since its last progress, and decides whether it may be tried again: failures of jobs,
// which `muster run` restarts, and failures of attempts inside a job.
//
// Progress is a checkpoint that is further ahead in training than the checkpoints at all failures before. A newer
// checkpoint alone is no progress: a program that saves its state at the start of each attempt may fail at the same
// batch every time.
#pragma once

#include "base/export.hpp"
#include "muster/error.hpp"
#include "muster/json.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

namespace muster::detail::run {

/// How far a run has come, according to its newest checkpoint.
struct RunPoint {
  std::int64_t global_step = 0;
  std::int64_t epoch = 0;
  std::int64_t training_iteration = 0;
  std::int64_t rollbacks = 0;  ///< number of times that the user has rolled the run back
  std::string content = {};    ///< CRC-32 over the saved state and files, without the random state; empty if none

  /// True if training has come further than `before`: to a later batch or epoch, or, if no batches are counted, to a
  /// later report, unless it has saved the same again. Also true if the user has rolled the run back since `before`.
  bool is_beyond(const RunPoint& before) const noexcept;
};

/// The points of all runs that are counted together: of each trial of a sweep, by its name, and of the run itself, by
/// the empty name.
using RunPoints = std::map<std::string, RunPoint>;
MUSTER_INTERNAL_API Json to_json(const RunPoints& points);
MUSTER_INTERNAL_API RunPoints points_from(const Json& json);

/// True if a run has come further in `now` than in `before`, or is not in `before`.
MUSTER_INTERNAL_API bool is_progress(const RunPoints& now, const RunPoints& before) noexcept;

struct Failures {
  int count = 0;
  /// For each run, the furthest point at any failure so far; empty if there was no checkpoint.
  RunPoints furthest = {};

  /// Returns these failures and one more. `now`: how far the runs have come. If that is progress, the count begins
  /// again with 1.
  MUSTER_INTERNAL_API Failures with_one_more(const RunPoints& now) const;
  /// True if `max_failures` (FailureConfig::max_failures or --max-failures) allows another try. A negative number
  /// always does.
  bool may_retry(int max_failures) const noexcept { return max_failures < 0 || count <= max_failures; }
};

/// True if an exit code means that the program or its data were refused. A start that ends with such a code changes
/// nothing in the run.
MUSTER_INTERNAL_API bool is_refusal(ExitCode code) noexcept;

/// Returns how long to wait before the next try: 0 s after the first failure, then 1, 2, 4 … s, at most a minute.
MUSTER_INTERNAL_API std::chrono::seconds retry_delay(const Failures& failures) noexcept;

/// Returns the index of the newest checkpoint in the run's folder; -1 if there is none.
int newest_checkpoint_index(const std::filesystem::path& run);

/// Returns the point of the newest checkpoint in the run's folder that can be read and is not rolled back; none if
/// there is none.
MUSTER_INTERNAL_API std::optional<RunPoint> point_of(const std::filesystem::path& run);
/// Returns the result of point_of() under the empty name; an empty map if point_of() returns none.
MUSTER_INTERNAL_API RunPoints points_of(const std::filesystem::path& run);

/// Returns `before` with one more failure. `points` reads from the folder `run` how far the run, or the runs of a
/// sweep, have come. If the folder cannot be read, that counts as no progress.
MUSTER_INTERNAL_API Failures add_failure(const Failures& before, const std::filesystem::path& run,
                                         RunPoints (*points)(const std::filesystem::path&) = points_of);

/// Returns the failures in `.failures.json` in the run's folder. Returns none if the file is missing or cannot be read,
/// or if a `muster run` with another ID than `supervisor` has written it.
MUSTER_INTERNAL_API std::optional<Failures> read_failures(const std::filesystem::path& run,
                                                          const std::string& supervisor);
/// Writes `.failures.json`, for later processes of the `muster run` with the ID `supervisor`.
MUSTER_INTERNAL_API void write_failures(const std::filesystem::path& run, const std::string& supervisor,
                                        const Failures& failures);

}  // namespace muster::detail::run
