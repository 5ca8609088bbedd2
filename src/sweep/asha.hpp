// The decisions of the asynchronous successive-halving scheduler: pure functions.
#pragma once

#include "muster/sweep.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace muster::detail::sweep {

/// The metric in a report's row as a score, of which more is better; empty if the row lacks the metric. A value that is
/// not a number (NaN is null in a row) is worse than every number.
std::optional<double> score_of(const Json& row, const std::string& metric, ScoreOrder mode);

/// The row of a trial that counts: of its last report that has the metric, or else of its last report; null if there is
/// none. `last`: the metrics of the trial's Result, which come first, since a Trainable of one's own may add to them.
Json row_to_compare(const Json& last, const std::vector<Json>& rows, const std::string& metric);

/// The options' mode; without a metric there is nothing to compare, and any mode serves.
inline ScoreOrder order_of(const SweepOptions& options) { return options.mode.value_or(ScoreOrder::max); }
inline std::optional<double> score_of(const Json& row, const SweepOptions& options) {
  return score_of(row, options.metric, order_of(options));
}

/// The rungs: the reports at which trials are compared, before max_t.
std::vector<std::int64_t> rungs_of(const Asha& scheduler);

/// The last rung, from number `next` on, that a trial has reached with report `iteration`; empty if none.
std::optional<std::size_t> rung_at(const std::vector<std::int64_t>& rungs, std::size_t next, std::int64_t iteration);

/// A trial's comparison at a rung.
struct RungScore {
  std::size_t rung = 0;
  std::int64_t iteration = 0;  ///< the report with the score
  double score = 0;
};
/// The comparisons of the trial that has reported these rows.
std::vector<RungScore> comparisons_in(const std::vector<Json>& rows, const std::vector<std::int64_t>& rungs,
                                      const std::string& metric, ScoreOrder mode);

/// True if a trial with the score `own` continues after a rung. `all`: the scores at this rung so far, with its own.
/// One without a number is worse than all others, even than those without one.
bool continues_after_rung(double own, const std::vector<double>& all, int reduction_factor);

}  // namespace muster::detail::sweep
