#include "base/log.hpp"
#include "checkpoint/rollbacks.hpp"
#include "comm/on_ranks.hpp"
#include "observe/history.hpp"
#include "train/fit.hpp"

#include <algorithm>
#include <limits>

namespace muster::detail::train {
namespace {

/// Those that are whole and led to where the run stands: best first by the score, else newest first.
std::vector<CheckpointInfo> ranked_checkpoints(const std::filesystem::path& run, const CheckpointConfig& config) {
  const auto steps = checkpoint::read_rollbacks(run);
  auto all = list_checkpoints(run);
  std::erase_if(all, [&](const CheckpointInfo& info) {
    return !info.problem.empty() || checkpoint::rolled_back(steps, info.index);
  });
  std::reverse(all.begin(), all.end());
  const auto& attribute = config.checkpoint_score_attribute;
  if (attribute.empty()) return all;
  const auto score = [&](const CheckpointInfo& info) {
    const auto value = info.metrics.is_object() ? info.metrics.value(attribute, Json()) : Json();
    if (!value.is_number()) return -std::numeric_limits<double>::infinity();
    return config.checkpoint_score_order == ScoreOrder::max ? value.get<double>() : -value.get<double>();
  };
  std::stable_sort(all.begin(), all.end(), [&](const auto& a, const auto& b) { return score(a) > score(b); });
  return all;
}

}  // namespace

Result finish(const Plan& plan, RunFolder& run, const std::optional<Error>& error) {
  if (!error && plan.world().rank() == 0) run.mark_finished();
  Result result;
  try {
    result = read_result(plan, run);
  } catch (const Error& unreadable) {
    if (!error) throw;
    log::warn(unreadable.what());  // and not in the place of the cause
    result.path = run.path();
  }
  result.error = error;
  return result;
}

Result read_result(const Plan& plan, const RunFolder& run) {
  const auto content = Json::parse(comm::on_root(plan.world(), [&] {
    Json checkpoints = Json::array();
    const auto ranked = ranked_checkpoints(run.path(), plan.options.run_config.checkpoint_config);
    for (const auto& info : ranked) checkpoints.push_back({info.path.string(), info.metrics});
    const auto newest = std::ranges::max_element(ranked, {}, &CheckpointInfo::index);
    return Json{observe::History::read(run.path()), checkpoints, newest == ranked.end() ? "" : newest->path.string()}
        .dump();
  }));
  Result result;
  result.path = run.path();
  result.metrics_history = content[0].get<std::vector<Json>>();
  if (!result.metrics_history.empty()) result.metrics = result.metrics_history.back();
  for (const auto& entry : content[1])
    result.best_checkpoints.emplace_back(Checkpoint::from_directory(entry[0].get<std::string>()), entry[1]);
  if (const auto newest = content[2].get<std::string>(); !newest.empty())
    result.checkpoint = Checkpoint::from_directory(newest);
  return result;
}

}  // namespace muster::detail::train
