// What the scheduler decides: pure functions.
#pragma once

#include "muster/sweep.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace muster::detail::sweep {

/// The metric in a report's row as a number of which more is better; empty where the row has none. What is not a number
/// (NaN is null in a row) is worse than all that are.
std::optional<double> score_of(const Json& row, const std::string& metric, ScoreOrder mode);

/// The reports at which trials are compared, before max_t.
std::vector<std::int64_t> rungs_of(const Asha& scheduler);

/// The last rung from number `next` on to which a trial with that report has come.
std::optional<std::size_t> rung_at(const std::vector<std::int64_t>& rungs, std::size_t next, std::int64_t iteration);

/// Whether one with `own` goes on beyond a rung to which trials have come with `all`, its own among them.
bool goes_on(double own, const std::vector<double>& all, int reduction_factor);

}  // namespace muster::detail::sweep
