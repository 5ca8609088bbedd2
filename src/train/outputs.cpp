#include "train/outputs.hpp"

#include "base/log.hpp"
#include "muster/error.hpp"

#include <string>
#include <utility>

namespace muster::detail::train {

void Outputs::commit(const checkpoint::Contents& contents) {
  newest = store.commit(contents);
  sinks.tell(&observe::Sink::checkpoint, *newest);
}

void Outputs::check_score(const Json& row, bool saves, bool epoch_complete) {
  const auto& attribute = config.checkpoint_score_attribute;
  if (attribute.empty()) return;
  const auto at = row.find(attribute);
  const bool there = at != row.end() && (at->is_number() || at->is_null());  // NaN is null
  score_reported = score_reported || there;
  if (!saves || there) return;
  const std::string doing = "keeping the best checkpoints by \"" + attribute + "\"";
  if (at != row.end()) throw Error(ExitCode::usage, doing, "it is reported and is not a number", "Report a number");
  if (!score_reported && epoch_complete) {
    std::string names;
    for (const auto& [name, value] : row.items()) names += (names.empty() ? "" : ", ") + name;
    throw Error(ExitCode::usage, doing, "no such metric is reported",
                "Choose one of " + names + ", or report it with every checkpoint, as NaN where it is not known");
  }
  if (!std::exchange(score_missed, true) && first_worker)
    log::warn(doing + ": it is not reported with this checkpoint, which counts as the worst");
}

}  // namespace muster::detail::train
