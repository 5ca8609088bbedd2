#include "session/saver.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "checkpoint/inspect.hpp"
#include "checkpoint/merge.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/on_ranks.hpp"
#include "session/session_state.hpp"
#include "state/collect.hpp"
#include "state/training_position.hpp"
#include "watch/time_use.hpp"
#include "watch/trace.hpp"

#include <map>
#include <string>
#include <utility>

namespace muster::detail::session {
namespace {

/// Returns the state. Throws an Error if JSON cannot hold it.
Json require_lossless(Json state, const std::string& of) {
  require_json_lossless(state, of, "Let its state() keep it as null");
  return state;
}

}  // namespace

Saver::Saver(SessionState& session) : session_(session) {
  if (!session_.outputs.config.async_save) return;
  snapshot_sources_ = std::make_shared<optim::SnapshotSources>();
  if (!comm::threads_may_call_mpi() && session_.workers.is_first())
    log::warn("async_save: MPI was started for one thread, so each report waits until its checkpoint is written");
}

state::TrainingPosition Saver::training_position(bool of_report) const {
  const auto& steps = *session_.progress.steps;
  const auto& preprocessor = session_.data.preprocessor;
  return {.is_from_run = true,
          .training_iteration = session_.progress.training_iteration,
          .epoch = steps.epoch.number,
          .epoch_complete = session_.epoch_end.is_complete(),
          .epoch_counted = steps.epoch.is_counted(),
          .several_reports = session_.epoch_end.has_several_reports(),
          .passes_before_more = steps.epoch.passes_before_more,
          .global_step = steps.global_step,
          .samples_since_report = of_report ? 0 : steps.samples_since_report,  // a report has counted them already
          .time_total_s = session_.progress.total_seconds(),
          .seed = session_.workers.seed,
          .threads_per_worker = session_.resolved.threads_per_worker,
          .positions = session_.data.pass_positions->positions().get<std::map<std::string, Json>>(),
          .preprocessor = preprocessor ? require_lossless(preprocessor->state(), "the preprocessor") : Json(nullptr),
          .has_preprocessor = preprocessor != nullptr,
          .callbacks = require_lossless(session_.outputs.observers.callbacks().state(), "the callback")};
}

void Saver::merge_given(checkpoint::CheckpointContents& contents, const std::optional<Checkpoint>& given) const {
  if (given) contents.directory = given->path();
  // Entries of a checkpoint that from_dict() has made become part of the new checkpoint.
  for (auto merged = checkpoint::merge_entries(session_.workers.control, given);
       const auto& [name, value] : merged.values.items()) {
    if (contents.state.values.contains(name)) {
      if (session_.workers.is_first())
        log::warn("saving the entry " + name + ": the state and the checkpoint hold one; the state's is kept");
      continue;
    }
    contents.state.values[name] = value;
    contents.state.tensors.merge(state::select_entry(merged, name).tensors);
  }
}

Checkpoint Saver::save(const Contents& what) {
  const watch::ScopedActivity saving(watch::Activity::save);
  const watch::TraceSpan span("save");
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  session_.resumer.confirm_start();
  checkpoint::CheckpointContents contents{.state = {},
                                          .random_state = session_.workers.random_state(),
                                          .directory = {},
                                          .metrics = what.row,
                                          .metadata = session_.resolved.options.metadata};
  if (what.entries != nullptr) state::gather(*what.entries);
  comm::run_on_all(session_.workers.control, [&] {
    if (session_.workers.is_first()) session_.run.require_not_replaced();
    const auto position = training_position(!what.row.empty());
    if (position.epoch_complete) session_.progress.steps->epoch.last_complete = position.epoch;
    contents.position_json = to_json(position);
    if (what.entries == nullptr) return;
    state::require_own_weights(*what.entries);
    contents.state = state::collect(*what.entries);
    contents.replication = state::replication_of(*what.entries);
    for (const char* own : {state::gradients_name, state::weights_name})
      contents.replication[own] = state::Replication::averaged;
  });
  if (what.entries != nullptr) session_.gradients.add_to(contents.state, *what.entries, session_.workers.control);
  if (what.given != nullptr) merge_given(contents, *what.given);
  const bool is_of_files_alone = contents.state.tensors.empty() && contents.state.values.empty();
  if (what.leaves_out_state && is_of_files_alone && session_.workers.is_first() && !std::exchange(has_warned_, true))
    log::warn(
        "a checkpoint of files alone is saved, and state.restore() cannot restore the State from it. Report the State "
        "with the files: session.report(metrics, state, files)");
  using Mode = checkpoint::CheckpointStore::Mode;
  collect_duration_ = Clock::now() - begin;
  if (!session_.outputs.config.async_save || what.must_wait)
    return session_.outputs.commit(std::move(contents), Mode::sync);
  for (auto* const source : *snapshot_sources_)
    if (auto snapshot = source->take_snapshot()) contents.snapshots.push_back(std::move(*snapshot));
  return session_.outputs.commit(std::move(contents), Mode::async);
}

std::vector<ReportedCheckpoint> Saver::reported_checkpoints() const {
  static_cast<void>(session_.outputs.wait_for_newest());  // waits for the save in the background
  const auto all = comm::run_on_root(session_.workers.control, [&] {
    Json found = Json::array();
    for (const auto& info : checkpoint::intact_checkpoints(session_.run.path(), session_.outputs.store->rollbacks()))
      found.push_back({info.path.string(), info.metrics});
    return found;
  });
  std::vector<ReportedCheckpoint> reported;
  for (const auto& one : all)
    reported.push_back({session_.outputs.store->as_this_rank(Checkpoint::from_directory(one[0].get<std::string>())),
                        one[1], checkpoint::status_from(one[1])});
  return reported;
}

}  // namespace muster::detail::session
