// The decisions of the asynchronous successive-halving scheduler. All functions are pure.
#pragma once

#include "muster/sweep.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace muster::detail::sweep {

/// Returns the metric in a report's row as a score, of which more is better; none if the row does not have the metric.
/// If the value is not a number (NaN is null in a row), the score is worse than every number.
std::optional<double> score_of(const Json& row, const std::string& metric, ScoreOrder mode);

/// Returns the row that counts for a trial: of its last report that has the metric, or else of its last report; null if
/// there is none. `last`: the metrics of the trial's Result; they come first, since a user's own Trainable may have
/// added to them.
Json row_to_compare(const Json& last, const std::vector<Json>& rows, const std::string& metric);

/// Returns the options' mode. Without a metric there is nothing to compare, so any mode will do.
inline ScoreOrder order_of(const SweepOptions& options) { return options.mode.value_or(ScoreOrder::max); }
inline std::optional<double> score_of(const Json& row, const SweepOptions& options) {
  return score_of(row, options.metric, order_of(options));
}

/// Returns the rungs: the reports at which trials are compared, before max_t.
std::vector<std::int64_t> rungs_of(const Asha& scheduler);

/// Returns the last rung, from number `next` on, that a trial has reached with report `iteration`; none if it has
/// reached none.
std::optional<std::size_t> rung_at(const std::vector<std::int64_t>& rungs, std::size_t next, std::int64_t iteration);

/// The score of a trial at a rung.
struct RungScore {
  std::size_t rung = 0;
  std::int64_t iteration = 0;  ///< the report that has given the score
  double score = 0;
};
/// Returns the scores at the rungs of a trial that has reported these rows. If a report reaches several rungs at once,
/// its score is that at the last of them.
std::vector<RungScore> comparisons_in(const std::vector<Json>& rows, const std::vector<std::int64_t>& rungs,
                                      const std::string& metric, ScoreOrder mode);

/// True if a trial with the score `own` continues after a rung: if its score is among the best 1/reduction_factor,
/// rounded up, of `all`, the scores at this rung so far with its own. A trial whose score is not a number counts as
/// the worst, even among others whose score is not a number.
bool continues_after_rung(double own, const std::vector<double>& all, int reduction_factor);

}  // namespace muster::detail::sweep
