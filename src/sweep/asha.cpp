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

bool continues_after_rung(double own, const std::vector<double>& all, int reduction_factor) {
  const auto factor = static_cast<std::size_t>(reduction_factor);
  const auto better = std::ranges::count_if(all, [&](double other) { return other > own; });
  return static_cast<std::size_t>(better) < (all.size() + factor - 1) / factor;
}

}  // namespace muster::detail::sweep
