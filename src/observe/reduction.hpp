// The metrics of all ranks become one row: a pure function.
#pragma once

#include "muster/metrics.hpp"

#include <string>
#include <vector>

namespace muster::detail::observe {

/// A rank's metrics as bytes that keep NaN and integers. A reserved name (one that the row itself has, "epoch" aside)
/// is an Error (ExitCode::user_error).
Json encode(const Metrics& metrics);

/// One value per key, over the ranks that gave the key: integers that are equal stay; numbers become the mean weighted
/// by samples (1 where a rank gave none); anything else is that of the lowest rank. With `reduce` false every key has
/// the list over its ranks. NaN and infinity become null.
Json reduce(const std::vector<Json>& ranks, bool reduce);

}  // namespace muster::detail::observe
