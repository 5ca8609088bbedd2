#include "sweep/asha.hpp"

#include <algorithm>
#include <limits>

namespace muster::detail::sweep {

std::optional<double> score_of(const Json& row, const std::string& metric, ScoreOrder mode) {
  const auto found = row.is_object() ? row.find(metric) : row.end();
  if (found == row.end()) return {};
  if (!found->is_number()) return -std::numeric_limits<double>::infinity();
  return mode == ScoreOrder::max ? found->get<double>() : -found->get<double>();
}

Json row_to_compare(const Json& last, const std::vector<Json>& rows, const std::string& metric) {
  if (last.contains(metric)) return last;
  const auto has_metric = [&](const Json& row) { return row.contains(metric); };
  const auto row = std::find_if(rows.rbegin(), rows.rend(), has_metric);
  return row == rows.rend() ? last : *row;
}

std::vector<std::int64_t> rungs_of(const Asha& scheduler) {
  std::vector<std::int64_t> rungs;
  for (auto rung = scheduler.grace_period; rung < scheduler.max_t; rung *= scheduler.reduction_factor) {
    rungs.push_back(rung);
    if (rung > scheduler.max_t / scheduler.reduction_factor) break;
  }
  return rungs;
}

std::optional<std::size_t> rung_at(const std::vector<std::int64_t>& rungs, std::size_t next, std::int64_t iteration) {
  std::optional<std::size_t> last;
  for (; next < rungs.size() && rungs[next] <= iteration; ++next) last = next;
  return last;
}

std::vector<RungScore> comparisons_in(const std::vector<Json>& rows, const std::vector<std::int64_t>& rungs,
                                      const std::string& metric, ScoreOrder mode) {
  std::vector<RungScore> comparisons;
  std::size_t next = 0;
  for (const auto& row : rows) {
    const auto score = score_of(row, metric, mode);
    const auto iteration = row.value("training_iteration", std::int64_t{0});
    const auto rung = rung_at(rungs, next, iteration);
    if (!score || !rung) continue;
    comparisons.push_back({*rung, iteration, *score});
    next = *rung + 1;
  }
  return comparisons;
}

bool continues_after_rung(double own, const std::vector<double>& all, int reduction_factor) {
  const auto factor = static_cast<std::size_t>(reduction_factor);
  auto better = std::ranges::count_if(all, [&](double other) { return other > own; });
  // A trial whose score is not a number (−∞) counts as worse than all others.
  if (own == -std::numeric_limits<double>::infinity()) better = std::ssize(all) - 1;
  return static_cast<std::size_t>(better) < (all.size() + factor - 1) / factor;
}

}  // namespace muster::detail::sweep
