#include "session/outputs.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "base/run_names.hpp"
#include "comm/agreement.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"
#include "storage/tier.hpp"
#include "watch/time_use.hpp"
#include "watch/trace.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::session {

std::optional<std::string> problem_with_name(const std::string& name) {
  if (run_names::is_own(name)) return "a file of the run or of a checkpoint has this name";
  if (!is_utf8(name)) return "it is not UTF-8";
  const bool plain = !name.empty() && name.size() <= 200 && name.front() != '.' && !name.starts_with("checkpoint_") &&
                     std::ranges::none_of(name, [](unsigned char c) { return c < 0x20 || c == '/' || c == 0x7f; });
  if (plain) return {};
  return "a name has 1 to 200 bytes, no '/', no control characters, and no '.' or \"checkpoint_\" at its beginning";
}

void link_name(const std::filesystem::path& checkpoint, const std::string& name) noexcept {
  if (name.empty()) return;
  try {
    if (const auto index = storage::Tier::index_of(checkpoint.filename()))
      storage::tier_of(checkpoint.parent_path())->set_name(*index, name);
  } catch (const std::exception& error) {
    log::warn(str("the checkpoint could not be named: ", error.what()));
  }
}

std::function<void(std::int64_t, const Json&)> Outputs::row_updater() {
  return [this](std::int64_t training_iteration, const Json& fields) {
    observers.tell(&observe::Observer::validated, training_iteration, fields);
  };
}

Checkpoint Outputs::commit(checkpoint::CheckpointContents contents, checkpoint::CheckpointStore::Mode mode) {
  async_checkpoint_name = contents.metrics.value("checkpoint_name", "");
  auto made = store->commit(std::move(contents), mode);
  async_checkpoint = made;
  if (mode == checkpoint::CheckpointStore::Mode::sync && config.fast_tier.empty()) wait_for_save();
  return made;
}

bool Outputs::finish_save() {
  if (!async_checkpoint) return false;
  const watch::ScopedActivity saving(watch::Activity::save);
  const watch::TraceSpan span("wait for the save");
  const auto written = *std::exchange(async_checkpoint, std::nullopt);
  if (const auto error = store->finish()) {
    observers.tell_and_log_errors("a lost checkpoint", &observe::Observer::checkpoint_lost, written);
    throw *error;
  }
  newest = written;
  has_saved = true;
  if (is_first_worker) link_name(written.path(), async_checkpoint_name);
  return true;
}

void Outputs::wait_for_save() {
  if (finish_save()) comm::run_on_all(*control, [&] { observers.tell(&observe::Observer::checkpoint, *newest); });
}

std::optional<Checkpoint> Outputs::wait_for_newest() const {
  return async_checkpoint && store->background().wait() ? async_checkpoint : newest;
}

void Outputs::wait_for_save_and_warn() noexcept {
  bool is_saved = false;
  try {
    is_saved = finish_save();
  } catch (...) {
    if (is_first_worker) log::warn("a checkpoint is lost: " + comm::current_outcome().text);
  }
  if (is_saved) observers.tell_and_log_errors("a checkpoint", &observe::Observer::checkpoint, *newest);
}

void Outputs::check_score(const Json& row, bool saves, bool epoch_complete) {
  const auto& attribute = config.checkpoint_score_attribute;
  if (attribute.empty()) return;
  const auto at = row.find(attribute);
  const bool there = at != row.end() && (at->is_number() || at->is_null());  // JSON stores NaN as null
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
  if (!std::exchange(has_warned_of_missing_score, true) && is_first_worker)
    log::warn(doing + ": it is not reported with this checkpoint, which counts as the worst");
}

}  // namespace muster::detail::session
