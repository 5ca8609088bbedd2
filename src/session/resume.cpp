// Resuming: chooses the checkpoint that a session goes on from, and restores it. The inverse of save.cpp.
#include "base/file.hpp"
#include "base/log.hpp"
#include "checkpoint/fast_tier.hpp"
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
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::session {
namespace {

/// The checkpoint that --resume PATH names: PATH itself, or the newest whole checkpoint of the run at PATH.
Checkpoint checkpoint_at(const std::filesystem::path& path, const Communicator& control) {
  return Checkpoint::from_directory(comm::run_on_root(control, [&] {
    if (std::filesystem::exists(status_of(path / "manifest.json"))) return path.string();
    const auto newest = checkpoint::newest_intact(path);
    const bool has_left_some = checkpoint::may_hold_newer(storage::Tier(path));
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

/// Logs that --resume PATH is ignored, since the run has checkpoints of its own.
void say_not_taken(const std::filesystem::path& path, const std::filesystem::path& newest) {
  std::error_code ignored;
  const auto text = "the run goes on from its own " + newest.filename().string() + ", not from " + path.string();
  if (std::filesystem::exists(path, ignored))
    log::info(text + ", from which only a run without a checkpoint starts");
  else
    log::warn(text + ", which is not there");
}

/// A checkpoint of this run that --resume PATH names, by whatever name the run's folder is reached.
struct OwnCheckpoint {
  bool is_own = false;         ///< false: PATH names something else
  std::optional<int> index{};  ///< none if the run has gone back to it already
  std::string name = {};       ///< its name in the run, or the path of a link elsewhere that leads to it
};

/// Collective.
OwnCheckpoint own_checkpoint(const std::filesystem::path& path, const run::RunFolder& run, const Communicator& control,
                             const checkpoint::CheckpointStore& store) {
  namespace fs = std::filesystem;
  const auto found = comm::run_on_root(control, [&]() -> Json {
    std::error_code ignored;  // the path may not exist
    const auto is_in_run = [&](const fs::path& one) {
      return one.parent_path() == run.path() || fs::equivalent(one.parent_path(), run.path(), ignored);
    };
    // The path may be a link: a report's checkpoint_dir_name, or one elsewhere.
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

/// The checkpoint to go on from: the run's own newest, else --resume PATH, else resume_from_checkpoint. Goes back to an
/// older one of the run first if --resume PATH names it. Collective.
std::optional<Checkpoint> choose_checkpoint(const run::ResolvedOptions& resolved, const run::RunFolder& run,
                                            const Communicator& control, checkpoint::CheckpointStore& store) {
  const auto& flags = resolved.launch.flags();
  const auto path = flags.resume == Resume::path ? run::absolute_path(flags.resume_path) : std::filesystem::path();
  const bool named =
      !path.empty() && !comm::run_on_root(control, [&] { return run.is_in_run_of_earlier_trainer(path); });
  // A checkpoint of this run means to go back to it. Any other is only for a run that has no checkpoint yet.
  const auto own = named ? own_checkpoint(path, run, control, store) : OwnCheckpoint();
  if (own.index) store.roll_back(*own.index, own.name);
  if (auto newest = store.newest()) {
    if (named && !own.is_own && run.is_first_trainer()) say_not_taken(path, newest->path());
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
        !storage::Tier(seed->path()).list().published.empty())
      throw Error(ExitCode::usage, "starting the run " + run.path().string() + " from " + given->path().string(),
                  "that is the folder of a run",
                  "Give resume_from_checkpoint one of its checkpoints: Result::from_path(folder).checkpoint");
  });
  return seed;
}

/// Tells the history which earlier checkpoints led to this one, from which the run goes on.
void set_course(observe::AttemptStart& moment, int index, std::vector<checkpoint::Rollback> rollbacks) {
  moment.was_given_up = std::ranges::any_of(
      rollbacks, [&](const auto& rollback) { return rollback.to < index && index <= rollback.last_index; });
  moment.is_ancestor = [rollbacks = std::move(rollbacks), index](const std::string& name) {
    const auto other = storage::Tier::index_of(name);
    return other && *other <= index && !checkpoint::is_rolled_back(rollbacks, *other);
  };
}

/// Loads entries from a checkpoint that no run has saved. Warns of entries that it does not hold. True if it loaded
/// any.
bool restore_what_is_there(const StateEntries& entries, const checkpoint::RestoredCheckpoint& content,
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

/// An estimate of the bytes that a save writes: the parameters, and as much for each of an optimizer's two moments.
double bytes_of(const StateEntries& entries) {
  double bytes = 0;
  for (const auto& [name, entry] : entries)
    for (const auto& [path, tensor] : entry.object()->parameters()) bytes += 3.0 * static_cast<double>(tensor.nbytes());
  return bytes;
}

}  // namespace

void SessionState::resume() {
  const watch::ScopedCallName resume("resuming");
  start.checkpoint = choose_checkpoint(resolved, run, workers.control, *outputs.store);
  outputs.newest = start.checkpoint;
  observe::AttemptStart moment;
  Json preprocessor;
  const bool own = start.checkpoint && start.checkpoint->path().parent_path() == run.path();
  if (start.checkpoint) {
    start.content = outputs.store->read(*start.checkpoint);
    start.manifest_crc32 = start.content->manifest_crc32;
    const auto& progress = start.content->trainer;
    const auto& path = start.checkpoint->path();
    preprocessor = progress.preprocessor;
    auto row = start.content->metrics;
    outputs.score_reported = row.contains(outputs.config.checkpoint_score_attribute);
    // Another run's reports and training time do not count for this run.
    if (own) {
      counters.training_iteration = progress.training_iteration;
      counters.seconds_in_earlier_jobs = progress.time_total_s;
      // A checkpoint that was saved between two reports has no row.
      if (row.contains("training_iteration"))
        row["checkpoint_dir_name"] = path.filename().string();
      else
        row = nullptr;
      moment = {.training_iteration = progress.training_iteration, .last_row = std::move(row)};
      comm::run_on_root(workers.control, [&] {
        moment.last_row = checkpoint::with_validation(path, std::move(moment.last_row));
        if (const auto index = storage::Tier::index_of(path.filename()))
          set_course(moment, *index, outputs.store->rollbacks());
      });
      start.callbacks = progress.callbacks;
      // A job that was killed after the save may not have made the link.
      if (const auto name = moment.last_row.is_object() ? moment.last_row.value("checkpoint_name", Json()) : Json();
          name.is_string() && !problem_with_name(name))
        start.name = name;
    }
  }
  outputs.sinks.start(workers.control, moment);
  if (validation != nullptr) {
    outputs.score_reported = true;  // a validation may give it
    if (workers.is_first())
      outputs.store->set_keep_predicate(
          [owing = validation](std::int64_t report) { return owing->awaits_result(report); });
  }
  if (start.checkpoint && workers.is_first()) {
    const auto& progress = start.content->trainer;
    const auto path = start.checkpoint->path().string();
    if (progress.is_from_run)
      log::info("resuming from " + path + " (report " + std::to_string(progress.training_iteration) + ", epoch " +
                std::to_string(progress.epoch + 1) + (progress.epoch_complete ? " done)" : " in progress)"));
    else
      log::info("starting from " + path);
  }
  data.prepare_preprocessor(preprocessor, own, workers.control);
}

void SessionState::take_up() {
  if (start.taken_up || !start.checkpoint) return;  // a run that starts anew has nothing to confirm
  comm::wait_for_all(workers.control);              // no rank has refused the start
  outputs.store->confirm_rollback();
  comm::run_on_root(workers.control, [&] {
    if (!start.name.empty()) link_name(start.checkpoint->path(), start.name);
    if (validation != nullptr)
      validation->resume(
          [&](std::int64_t of, const Json& fields) { outputs.sinks.tell(&observe::Sink::validated, of, fields); },
          outputs.store->rollbacks());
  });
  start.taken_up = true;
}

std::vector<ReportedCheckpoint> SessionState::reported_checkpoints() {
  require_training("looking for the run's checkpoints");
  static_cast<void>(outputs.wait_for_newest());  // waits for the checkpoint that is being written
  const auto all = comm::run_on_root(workers.control, [&] {
    Json found = Json::array();
    for (const auto& info : checkpoint::intact_checkpoints(run.path(), outputs.store->rollbacks()))
      found.push_back({info.path.string(), info.metrics});
    return found;
  });
  std::vector<ReportedCheckpoint> reported;
  for (const auto& one : all)
    reported.push_back({outputs.store->as_this_rank(Checkpoint::from_directory(one[0].get<std::string>())), one[1],
                        checkpoint::status_from(one[1])});
  return reported;
}

checkpoint::RestoredCheckpoint SessionState::read_again() {
  auto content = outputs.store->read(*start.checkpoint);
  comm::run_on_all(workers.control, [&] {
    if (content.manifest_crc32 != start.manifest_crc32)
      throw Error(ExitCode::retry, "restoring a state again",
                  start.checkpoint->path().string() + " has changed meanwhile",
                  "Start again, from a checkpoint that stays as it is");
  });
  return content;
}

bool SessionState::restore(const std::shared_ptr<const StateEntries>& entries) {
  require_training("restoring a state");
  const auto& newest = outputs.async_checkpoint ? outputs.async_checkpoint : outputs.newest;
  if (newest && (!start.checkpoint || newest->path() != start.checkpoint->path()))
    throw Error(
        ExitCode::usage, "restoring a state",
        "a report has saved " + newest->path().filename().string() + " since the run was started",
        "Restore before the first report; later, load entries with session.get_checkpoint()->load(name, object)");
  start.has_warned = true;
  stop.last_state = entries;
  stop.shutdown_budget.expect_save_bytes(bytes_of(*entries));
  if (!start.checkpoint) return false;
  // Released at the end of this function: its tensors are views of a file that may be pruned later.
  const auto saved = start.content ? *std::exchange(start.content, {}) : read_again();
  const auto& progress = saved.trainer;
  if (!progress.is_from_run) return restore_what_is_there(*entries, saved, start.checkpoint->path(), workers);
  try {
    state::restore(*entries, saved.state, {workers.rank(), workers.size()}, saved.per_rank);
  } catch (const state::WrongNumberOfRanks& error) {
    launch::tell_supervisor(launch::message_ranks_needed, std::to_string(error.needed()));
    throw;
  }
  counters.steps->global_step = progress.global_step;
  counters.steps->samples_since_report = progress.samples_since_report;
  counters.unknown_data.reports_within_epoch[1] = progress.several_reports;
  counters.steps->resumed_without_epochs = !progress.epoch_counted;
  const bool complete = progress.epoch_complete;
  data.pass_positions->resume_epoch(progress.epoch + (complete ? 1 : 0));
  for (const auto& [name, position] : progress.positions) data.pass_positions->restore(name, position, complete);
  workers.restore_random_state(saved, progress.training_iteration);
  take_up();
  return true;
}

void SessionState::warn_of_unrestored_state(bool reports_state) {
  if (!start.checkpoint || start.has_warned || !(start.was_given_to_user || reports_state)) return;
  start.has_warned = true;
  if (!workers.is_first()) return;
  const auto name = start.checkpoint->path().filename().string();
  if (!start.was_given_to_user)
    log::warn("the run goes on from " + name +
              ", but the training function has restored nothing from it; call state.restore() before the first epoch");
  else if (counters.training_iteration > 0)
    log::warn(
        "the run goes on from " + name + ", which the training function loads by itself: training_iteration is " +
        std::to_string(counters.training_iteration) + ", but " + (counters.steps->epoch_set ? "" : "epoch, ") +
        "global_step, the position in the data and the random state begin again; state.restore() restores all of them");
}

}  // namespace muster::detail::session
