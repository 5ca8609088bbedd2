// The metrics that the ranks report become one row: pure functions.
#pragma once

#include "muster/metrics.hpp"

#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::observe {

/// Whether every row has a field of that name, which no metric may have. (A metric may take the place of "epoch".)
bool is_reserved(std::string_view name);

/// A rank's metrics with their weights, and what they are made of. A reserved name is an Error (ExitCode::user_error).
Json to_json(const Metrics& metrics);
/// An Error that names the metric unless it has a value, as a tensor of several numbers has none.
void require_value(const std::string& name, const Metric& metric);

/// One value per key, over the ranks that gave the key: integers that are equal stay; numbers become the mean weighted
/// by samples (1 where a rank gave none); what is made of tallies is made of all of them; anything else is that of the
/// lowest rank. NaN and infinity become null.
Json mean_over_ranks(const std::vector<Json>& ranks);
/// The list of values per key, by rank; null for a rank that did not give the key.
Json list_over_ranks(const std::vector<Json>& ranks);

/// The first confusion matrix for which all ranks have counted as many samples of each class, as they do if each has
/// gone over the same samples; empty if there is none, or one rank alone.
std::string counted_everywhere(const std::vector<Json>& ranks);

}  // namespace muster::detail::observe
