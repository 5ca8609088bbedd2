// The fields that muster adds to the metrics in the row of a report.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>

namespace muster::detail {

/// True if muster writes a field of this name into rows, so that no metric may have it.
constexpr bool is_reserved(std::string_view name) {
  constexpr std::array<std::string_view, 15> reserved{
      "training_iteration", "global_step",   "timestamp",    "time_this_iter_s",    "time_total_s",
      "num_samples",        "samples_per_s", "world_size",   "checkpoint_dir_name", "checkpoint_name",
      "checkpoint_status",  "rank_times",    "memory_bytes", "late_ranks",          "live"};
  return std::ranges::find(reserved, name) != reserved.end();
}

/// True for the reserved fields and for "epoch", which a metric may replace.
constexpr bool is_row_field(std::string_view name) { return name == "epoch" || is_reserved(name); }

}  // namespace muster::detail
