#include "session/resumer.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/run_names.hpp"
#include "base/text.hpp"
#include "checkpoint/fast_tier.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "checkpoint/inspect.hpp"
#include "checkpoint/rollbacks.hpp"
#include "comm/on_ranks.hpp"
#include "launch/supervised.hpp"
#include "muster/error.hpp"
#include "session/session_state.hpp"
#include "session/validation.hpp"
#include "state/collect.hpp"
#include "state/stateful.hpp"
#include "storage/tier.hpp"
#include "watch/record.hpp"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::session {
namespace {

/// Returns the checkpoint that --resume PATH names: PATH itself, or the newest intact checkpoint of the run at PATH.
Checkpoint checkpoint_at(const std::filesystem::path& path, const Communicator& control) {
  return Checkpoint::from_directory(comm::run_on_root(control, [&] {
    // One rank resolves links for all ranks, since a link may be moved meanwhile.
    if (const auto folder = checkpoint::without_links(path);
        std::filesystem::exists(status_of(folder / "manifest.json")))
      return folder.string();
    const auto newest = checkpoint::newest_intact(path);
    const bool has_left_some = checkpoint::may_hold_newer(*storage::tier_of(path));
    const std::string fact = "the newest checkpoint of this run may still be in its fast tier",
                      remedy = "start it once more on the nodes that " + (path / "fast_tier.json").string() +
                               " names, which copies the checkpoint to its folder";
    if (!newest && has_left_some)
      throw Error(ExitCode::data, "resuming from " + path.string(), fact, "First " + remedy);
    if (!newest)
      throw Error(ExitCode::data, "resuming from " + path.string(), "there is no whole checkpoint",
                  "Name a checkpoint or a run's folder; `muster checkpoint ls` shows what a run has");
    if (has_left_some)
      log::warn("resuming from " + newest->string() + ": " + fact + ". To resume from that one, first " + remedy);
    return newest->string();
  }));
}

/// Logs that --resume PATH is ignored, since the run has a checkpoint of its own.
void log_ignored_resume(const std::filesystem::path& path, const std::filesystem::path& newest) {
  std::error_code ignored;
  const auto text = "the run goes on from its own " + newest.filename().string() + ", not from " + path.string();
  if (std::filesystem::exists(path, ignored))
    log::info(text + ", from which only a run without a checkpoint starts");
  else
    log::warn(text + ", which is not there");
}

/// Whether --resume PATH names a checkpoint of this run, whatever path leads to the run's folder.
struct OwnCheckpoint {
  bool is_own = false;         ///< false if PATH names something else
  std::optional<int> index{};  ///< the checkpoint's index; none if the run has gone back to it already
  std::string name = {};       ///< the checkpoint's name in the run; or the path, if PATH is a link from elsewhere
};

/// Finds out what PATH names. Throws an Error if it is in the run's folder but is not a checkpoint. Collective.
OwnCheckpoint own_checkpoint(const std::filesystem::path& path, const run::RunFolder& run, const Communicator& control,
                             const checkpoint::CheckpointStore& store) {
  namespace fs = std::filesystem;
  const auto found = comm::run_on_root(control, [&]() -> Json {
    std::error_code ignored;  // the path may not exist
    const auto is_in_run = [&](const fs::path& one) {
      return one.parent_path() == run.path() || fs::equivalent(one.parent_path(), run.path(), ignored);
    };
    // The path may be a link: a name that a report gave its checkpoint, or a link from elsewhere.
    const auto target = fs::canonical(path, ignored);
    if (!is_in_run(path) && (target.empty() || !is_in_run(target))) return false;
    if (store.has_rolled_back(is_in_run(path) ? path.filename().string() : path.string())) return true;
    const auto index = storage::Tier::index_of(target.empty() ? path.filename() : target.filename());
    if (!index)
      throw Error(ExitCode::data, "resuming from " + path.string(),
                  "it is in this run's folder and is not a checkpoint of it",
                  "Name a checkpoint; `muster checkpoint ls` shows those that are there");
    return {*index, is_in_run(path) ? path.filename().string() : path.string()};
  });
  if (found.is_boolean()) return {.is_own = found.get<bool>()};
  return {.is_own = true, .index = found[0].get<int>(), .name = found[1]};
}

/// Returns the checkpoint to resume from: the run's newest; if it has none, that of --resume PATH; else
/// resume_from_checkpoint. If --resume PATH names an older checkpoint of the run, first rolls back to it. Collective.
std::optional<Checkpoint> choose_checkpoint(const run::ResolvedOptions& resolved, const run::RunFolder& run,
                                            const Communicator& control, checkpoint::CheckpointStore& store) {
  const auto& flags = resolved.flags;
  const auto path = flags.resume == Resume::path ? run::absolute_path(flags.resume_path) : std::filesystem::path();
  const bool named =
      !path.empty() && !comm::run_on_root(control, [&] { return run.is_in_run_of_earlier_trainer(path); });
  // If PATH is a checkpoint of this run, the run goes back to it. Any other PATH only counts if the run has no
  // checkpoint yet.
  const auto own = named ? own_checkpoint(path, run, control, store) : OwnCheckpoint();
  if (own.index) store.roll_back(*own.index, own.name);
  if (auto newest = store.newest()) {
    if (named && !own.is_own && run.is_first_trainer()) log_ignored_resume(path, newest->path());
    return newest;
  }
  const auto with_real_path = [&](const Checkpoint& seed) {
    std::optional<Checkpoint> found;
    comm::run_on_all(control, [&] { found = checkpoint::CheckpointStore::resolved(seed); });
    return found;
  };
  if (named) return with_real_path(checkpoint_at(path, control));
  const auto& given = resolved.options.resume_from_checkpoint;
  if (flags.resume == Resume::must && !given && run.is_first_trainer())
    throw Error(ExitCode::data, "resuming the run " + run.path().string(), "it has no checkpoint",
                "Use --resume auto to start afresh");
  const auto all = control.all_reduce(std::int64_t{given.has_value()});
  if (all != 0 && all != control.size())
    throw Error(ExitCode::usage, "starting the run " + run.path().string(),
                "some ranks give resume_from_checkpoint and others do not", "Give it on every rank");
  if (!given) return {};
  const auto seed = with_real_path(*given);
  comm::run_on_root(control, [&] {
    if (!std::filesystem::exists(status_of(seed->path() / "manifest.json")) &&
        !storage::tier_of(seed->path())->list().published.empty())
      throw Error(ExitCode::usage, "starting the run " + run.path().string() + " from " + given->path().string(),
                  "that is the folder of a run",
                  "Give resume_from_checkpoint one of its checkpoints: Result::from_path(folder).checkpoint");
  });
  return seed;
}

/// Sets `moment.is_ancestor` and `moment.was_given_up`, by which the history finds the rows that led to checkpoint
/// `index`, from which the run resumes.
void set_ancestors(observe::AttemptStart& moment, int index, std::vector<checkpoint::Rollback> rollbacks) {
  moment.was_given_up = std::ranges::any_of(
      rollbacks, [&](const auto& rollback) { return rollback.to < index && index <= rollback.last_index; });
  moment.is_ancestor = [rollbacks = std::move(rollbacks), index](const std::string& name) {
    const auto other = storage::Tier::index_of(name);
    return other && *other <= index && !checkpoint::is_rolled_back(rollbacks, *other);
  };
}

/// Loads entries from a checkpoint that no run has saved. Warns about entries that the checkpoint lacks. True if it has
/// loaded any.
bool restore_present_entries(const StateEntries& entries, const checkpoint::RestoredCheckpoint& content,
                             const std::filesystem::path& path, const WorkerContext& workers) {
  StateEntries there;
  StateDict saved;
  std::string missing;
  for (const auto& [name, entry] : entries) {
    if (!content.state.values.contains(name)) {
      missing += (missing.empty() ? "" : ", ") + name;
      continue;
    }
    there.emplace_back(name, entry);
    auto part = state::select_entry(content.state, name);
    saved.tensors.merge(part.tensors);
    saved.values.update(part.values);
  }
  state::restore(there, saved, {workers.rank(), workers.size()});
  if (!missing.empty() && workers.is_first())
    log::warn(path.string() + " holds nothing for " + missing + ", which is not restored" +
              (content.state.values.empty() ? "; read files of your own with get_checkpoint()" : ""));
  return !there.empty();
}

}  // namespace

void Resumer::resume() {
  const watch::ScopedCallName resume("resuming");
  checkpoint_ = choose_checkpoint(session_.resolved, session_.run, session_.workers.control, *session_.outputs.store);
  session_.outputs.newest = checkpoint_;
  observe::AttemptStart moment;
  Json preprocessor;
  std::optional<bool> had_preprocessor;
  const bool own = checkpoint_ && checkpoint_->path().parent_path() == session_.run.path();
  if (checkpoint_) {
    content_ = session_.outputs.store->read(*checkpoint_);
    manifest_checksum_ = content_->manifest_checksum;
    preprocessor = content_->position.preprocessor;
    had_preprocessor = content_->position.has_preprocessor;
    session_.outputs.score_reported = content_->metrics.contains(session_.outputs.config.checkpoint_score_attribute);
    // The reports and the training time of another run do not count for this run.
    if (own) moment = restore_position(*content_);
  }
  session_.outputs.observers.start(session_.workers.control, moment);
  if (session_.outputs.validation != nullptr) {
    session_.outputs.score_reported = true;  // a validation may still give the score
    if (session_.workers.is_first())
      session_.outputs.store->set_keep_predicate(
          [waiting = session_.outputs.validation](std::int64_t report) { return waiting->awaits_result(report); });
  }
  if (checkpoint_ && session_.workers.is_first()) {
    const auto& position = content_->position;
    const auto path = checkpoint_->path().string();
    if (position.is_from_run)
      log::info(str("resuming from ", path, " (report ", position.training_iteration, ", epoch ", position.epoch + 1,
                    position.epoch_complete ? " done)" : " in progress)"));
    else
      log::info("starting from " + path);
    const bool promises_bits = own && (session_.workers.share.fixed || content_->world_size == session_.workers.size());
    if (const int before = position.threads_per_worker, now = session_.resolved.threads_per_worker;
        promises_bits && before > 0 && before != now)
      log::warn(str("the run was saved with ", counted(before, "thread"), " of torch per worker and goes on with ", now,
                    ", so its results have other bits; --threads ", before, " keeps them"));
  }
  session_.data.prepare_preprocessor(preprocessor, own, session_.workers.control, had_preprocessor);
}

observe::AttemptStart Resumer::restore_position(const checkpoint::RestoredCheckpoint& content) {
  const auto& path = checkpoint_->path();
  session_.progress.training_iteration = content.position.training_iteration;
  session_.progress.seconds_before_attempt = content.position.time_total_s;
  auto row = content.metrics;
  // A checkpoint that was saved between two reports has no row in its metrics.
  if (row.contains("training_iteration"))
    row["checkpoint_dir_name"] = path.filename().string();
  else
    row = nullptr;
  observe::AttemptStart moment{.training_iteration = content.position.training_iteration,
                               .last_row = std::move(row),
                               .global_step = content.position.global_step,
                               .time_total_s = content.position.time_total_s};
  comm::run_on_root(session_.workers.control, [&] {
    moment.last_row = checkpoint::with_validation(path, std::move(moment.last_row));
    if (const auto index = storage::Tier::index_of(path.filename()))
      set_ancestors(moment, *index, session_.outputs.store->rollbacks());
  });
  callback_states_ = content.position.callbacks;
  // A job that was killed after the save may not have made the link, so confirm_start() makes it.
  if (const auto name = moment.last_row.is_object() ? moment.last_row.value("checkpoint_name", Json()) : Json();
      name.is_string() && !problem_with_name(name))
    name_ = name;
  return moment;
}

void Resumer::confirm_start() {
  if (is_start_confirmed_ || !checkpoint_) return;  // without a checkpoint there is nothing to confirm
  comm::wait_for_all(session_.workers.control);     // now no rank can refuse the start
  session_.outputs.store->confirm_rollback();
  comm::run_on_root(session_.workers.control, [&] {
    if (!name_.empty()) link_name(checkpoint_->path(), name_);
    if (session_.outputs.validation != nullptr)
      session_.outputs.validation->resume(session_.outputs.row_updater(), session_.outputs.store->rollbacks());
  });
  is_start_confirmed_ = true;
}

checkpoint::RestoredCheckpoint Resumer::read_again() {
  auto content = session_.outputs.store->read(*checkpoint_);
  comm::run_on_all(session_.workers.control, [&] {
    if (content.manifest_checksum != manifest_checksum_)
      throw Error(ExitCode::retry, "restoring a state again", checkpoint_->path().string() + " has changed meanwhile",
                  "Start again, from a checkpoint that stays as it is");
  });
  return content;
}

void Resumer::require_nothing_saved() const {
  const auto& newest = session_.outputs.async_checkpoint ? session_.outputs.async_checkpoint : session_.outputs.newest;
  if (newest && (!checkpoint_ || newest->path() != checkpoint_->path()))
    throw Error(
        ExitCode::usage, "restoring a state",
        "a report has saved " + newest->path().filename().string() + " since the run was started",
        "Restore before the first report; later, load entries with session.get_checkpoint()->load(name, object)");
}

bool Resumer::is_between_passes(const state::TrainingPosition& position) {
  std::int64_t finished = 0;
  for (const auto& [name, in_data] : position.positions)
    if (in_data.is_object()) finished += in_data.value("finished", std::int64_t{0});
  const auto known = comm::run_on_root(session_.workers.control, [&]() -> std::int64_t {
    try {
      return read_json(checkpoint_->path().parent_path() / run_names::passes).at("passes_before_more");
    } catch (const std::exception&) {
      return 0;  // the run has recorded no such number
    }
  });
  auto& epoch = session_.progress.steps->epoch;
  epoch.passes_before_more = std::max(position.passes_before_more, known);
  const bool between = position.passes_before_more < finished && finished <= known;
  if (position.epoch_complete && !between) epoch.resumed_after = finished;
  return between;
}

bool Resumer::restore(const StateEntries& entries) {
  has_warned_ = true;
  if (!checkpoint_) return false;
  // Released when this function ends: the tensors are views of a file that may be pruned later.
  auto saved = content_ ? *std::exchange(content_, {}) : read_again();
  const auto gradients = state::take_gradients(saved.state, saved.world_size);
  const auto& position = saved.position;
  if (!position.is_from_run) return restore_present_entries(entries, saved, checkpoint_->path(), session_.workers);
  try {
    state::restore(entries, saved.state, {session_.workers.rank(), session_.workers.size()}, saved.per_rank);
  } catch (const state::WrongNumberOfRanks& error) {
    launch::tell_supervisor(launch::message_ranks_needed, std::to_string(error.needed()));
    throw;
  }
  session_.models.restore_gradients(entries, gradients, session_.workers.size());
  session_.progress.steps->global_step = position.global_step;
  session_.progress.steps->samples_since_report = position.samples_since_report;
  session_.epoch_end.restore(position.several_reports);
  using step::EpochCount;
  if (auto& epoch = session_.progress.steps->epoch; !epoch.is_counted())
    epoch.count = position.epoch_counted ? EpochCount::none : EpochCount::none_in_state;
  const bool between = is_between_passes(position), complete = position.epoch_complete && !between;
  session_.data.pass_positions->resume_epoch(position.epoch + (complete ? 1 : 0));
  for (const auto& [name, in_data] : position.positions) session_.data.pass_positions->restore(name, in_data, complete);
  session_.workers.restore_random_state(saved, position.training_iteration);
  confirm_start();
  return true;
}

void Resumer::warn_of_unrestored_state(bool reports_state) {
  if (!checkpoint_ || has_warned_ || !(was_given_to_user_ || reports_state)) return;
  has_warned_ = true;
  if (!session_.workers.is_first()) return;
  const auto name = checkpoint_->path().filename().string();
  const bool sets_epoch = session_.progress.steps->epoch.count == step::EpochCount::own;
  if (!was_given_to_user_)
    log::warn("the run goes on from " + name +
              ", but the training function has restored nothing from it; call state.restore() before the first epoch");
  else if (session_.progress.training_iteration > 0)
    log::warn(
        str("the run goes on from ", name, ", which the training function loads by itself: training_iteration is ",
            session_.progress.training_iteration, ", but ", sets_epoch ? "" : "epoch, ",
            "global_step, the position in the data and the random state begin again; state.restore() restores all of "
            "them"));
}

}  // namespace muster::detail::session
