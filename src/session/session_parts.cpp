#include "session/session_parts.hpp"

#include "base/log.hpp"
#include "comm/agreement.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <set>
#include <utility>

namespace muster::detail::session {

std::shared_ptr<data::ShardState> SessionData::shard(const std::string& name, const WorkerContext& workers) {
  if (const auto found = shards.find(name); found != shards.end()) return found->second;
  const auto dataset = datasets.find(name);
  if (dataset == datasets.end()) {
    std::string names;
    for (const auto& [known, unused] : datasets) names += (names.empty() ? "" : ", ") + known;
    throw Error(ExitCode::user_error, "taking the shard of the dataset \"" + name + "\"",
                "the trainer was given no such dataset",
                names.empty() ? "Give it one in the option datasets" : "It has " + names);
  }
  const auto& split = config.datasets_to_split.names();
  const bool is_split = config.split_all.value_or(false) || std::find(split.begin(), split.end(), name) != split.end();
  const bool is_stream = data::source_of(dataset->second)->is_stream();
  auto state = std::make_shared<data::ShardState>(
      data::PassPositionOptions{.name = name,
                                .share = workers.share,
                                .full_worker_count = workers.full_worker_count,
                                .split = is_split,
                                .seed = workers.seed,
                                .resumable = !is_stream,
                                .stream = is_stream},
      dataset->second, workers.device, is_stream ? std::optional(workers.control) : std::nullopt);
  pass_positions->add(state);
  return shards.emplace(name, state).first->second;
}

void SessionData::prepare_preprocessor(const Json& saved, bool own, const Communicator& control) {
  if (!preprocessor) {
    if (saved.is_null()) return;
    const char* const fact = "the checkpoint was saved with one, and the trainer has none";
    if (own) throw Error(ExitCode::usage, "restoring the preprocessor", fact, "Give the trainer the same one again");
    log::warn(std::string("preprocessing: ") + fact + "; the data are not preprocessed");
    return;
  }
  const bool fitted = control.all_reduce(std::int64_t{!preprocessor->fitted()}) == 0;
  if (!saved.is_null() && (own || !fitted)) {
    try {
      preprocessor->load_state(saved);
    } catch (const Json::exception& error) {
      throw Error(ExitCode::data, "restoring the preprocessor", error.what(),
                  "Build the same preprocessor as the run that was saved");
    }
  } else if (fitted) {
    // The user has fitted it, or an earlier attempt has.
  } else if (const auto train = datasets.find("train"); train != datasets.end()) {
    if (data::source_of(train->second)->is_stream())
      throw Error(ExitCode::usage, "fitting the preprocessor", "the dataset \"train\" is a stream",
                  "Fit it on a dataset of files, tensors or items, and give the trainer the fitted one");
    preprocessor->fit(train->second, control);
  } else {
    throw Error(ExitCode::user_error, "fitting the preprocessor", "there is no dataset \"train\"",
                "Give the trainer one, or a preprocessor that is fitted already");
  }
  for (auto& [name, dataset] : datasets) dataset = dataset.transform(preprocessor);
}

std::optional<std::string> problem_with_name(const std::string& name) {
  static const std::set<std::string> reserved_names{"params.json",    "result.json", "progress.csv", "error.txt",
                                                    "logs",           "stop",        "artifacts",    "steps_back.json",
                                                    "fast_tier.json", "trial.json",  "sweep.json",   "sweep.csv",
                                                    "manifest.json",  "state.h5",    "metadata.json"};
  if (reserved_names.contains(name)) return "a file of the run or of a checkpoint has this name";
  const bool plain = !name.empty() && name.size() <= 200 && name.front() != '.' && !name.starts_with("checkpoint_") &&
                     std::ranges::none_of(name, [](unsigned char c) { return c < 0x20 || c == '/' || c == 0x7f; });
  if (plain) return {};
  return "a name has 1 to 200 bytes, no '/', no control characters, and no '.' or \"checkpoint_\" at its beginning";
}

void link_name(const std::filesystem::path& checkpoint, const std::string& name) noexcept {
  if (name.empty()) return;
  try {
    storage::Tier(checkpoint.parent_path()).link_name(checkpoint.filename(), name);
  } catch (const std::exception& error) {
    log::warn(std::string("the checkpoint could not be named: ") + error.what());
  }
}

Checkpoint Outputs::commit(checkpoint::CheckpointContents contents, checkpoint::CheckpointStore::Mode mode) {
  async_checkpoint_name = contents.metrics.value("checkpoint_name", "");
  auto made = store->commit(std::move(contents), mode);
  async_checkpoint = made;
  if (mode == checkpoint::CheckpointStore::Mode::sync && config.fast_tier.empty()) wait_for_save();
  return made;
}

void Outputs::wait_for_save() {
  if (!async_checkpoint) return;
  const auto written = *std::exchange(async_checkpoint, std::nullopt);
  if (const auto error = store->finish()) {
    sinks.tell(&observe::Sink::checkpoint_lost, written);
    throw *error;
  }
  newest = written;
  if (is_first_worker) link_name(written.path(), async_checkpoint_name);
  sinks.tell(&observe::Sink::checkpoint, *newest);
  callbacks.tell(&Callback::on_checkpoint, *newest);
}

std::optional<Checkpoint> Outputs::wait_for_newest() const {
  return async_checkpoint && store->wait_for_success() ? async_checkpoint : newest;
}

void Outputs::wait_for_save_and_warn() noexcept {
  try {
    wait_for_save();
  } catch (...) {
    if (is_first_worker) log::warn("a checkpoint is lost: " + comm::current_outcome().text);
  }
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
  if (!std::exchange(has_warned_of_missing_score, true) && is_first_worker)
    log::warn(doing + ": it is not reported with this checkpoint, which counts as the worst");
}

}  // namespace muster::detail::session
