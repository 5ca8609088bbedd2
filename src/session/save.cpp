// Saving a session: what its checkpoints hold. The inverse is resume.cpp.
#include "base/json.hpp"
#include "base/log.hpp"
#include "checkpoint/merge.hpp"
#include "muster/error.hpp"
#include "optim/weight_averages.hpp"
#include "session/session_state.hpp"
#include "state/collect.hpp"
#include "state/stateful.hpp"

namespace muster::detail::session {
namespace {

/// Throws if a parameter holds the average of an EMA, since a run that resumed from it would train other weights.
void require_own_weights(const StateEntries& entries) {
  for (const auto& [name, entry] : entries)
    for (const auto& [path, parameter] : entry.object()->parameters())
      if (optim::is_average(parameter))
        throw Error(ExitCode::user_error, "saving " + name + (path.empty() ? "" : "/" + path),
                    "it has the average of an EMA instead of its own value",
                    "End the scope of EMA::apply() before the report");
}

}  // namespace

Checkpoint SessionState::save(const StateEntries* entries, const std::optional<Checkpoint>& files, bool any_files,
                              const Json& row) {
  take_up();
  const auto& steps = *counters.steps;
  const auto kept = [](Json state, const std::string& of) {
    require_json_lossless(state, of, "Let its state() keep it as null");
    return state;
  };
  const state::TrainerState progress{
      .is_from_run = true,
      .training_iteration = counters.training_iteration,
      .epoch = steps.epoch,
      .epoch_complete = is_epoch_complete(),
      .epoch_counted = steps.counts_epochs,
      .several_reports = counters.unknown_data.reports_within_epoch[1],
      .global_step = steps.global_step,
      .samples_since_report = row.empty() ? steps.samples_since_report : 0,  // a report has already counted them
      .time_total_s = counters.total_seconds(),
      .seed = workers.seed,
      .positions = data.pass_positions->positions().get<std::map<std::string, Json>>(),
      .preprocessor = data.preprocessor ? kept(data.preprocessor->state(), "the preprocessor") : Json(nullptr),
      .callbacks = kept(outputs.callbacks.state(), "the callback")};
  comm::run_on_root(workers.control, [&] { run.require_not_replaced(); });
  if (progress.epoch_complete) counters.steps->complete_epoch = steps.epoch;
  checkpoint::CheckpointContents contents{.state = {},
                                          .random_state = workers.random_state(),
                                          .directory = {},
                                          .progress = to_json(progress),
                                          .metrics = row,
                                          .metadata = resolved.options.metadata};
  if (entries != nullptr) {
    require_own_weights(*entries);
    contents.state = state::collect(*entries);
    contents.replication = state::replication_of(*entries);
  }
  if (files) contents.directory = files->path();
  if (any_files) {
    // The entries of a checkpoint that from_dict() made become part of this one.
    for (auto given = checkpoint::merge_entries(workers.control, files);
         const auto& [name, value] : given.values.items()) {
      if (contents.state.values.contains(name)) {
        if (workers.is_first())
          log::warn("saving the entry " + name + ": the state and the checkpoint hold one; the state's is kept");
        continue;
      }
      contents.state.values[name] = value;
      contents.state.tensors.merge(state::select_entry(given, name).tensors);
    }
  }
  using Mode = checkpoint::CheckpointStore::Mode;
  if (!outputs.config.async_save || stop.request.is_known()) return outputs.commit(std::move(contents), Mode::sync);
  for (auto* const step : *snapshot_sources)
    if (auto snapshot = step->take_snapshot()) contents.snapshots.push_back(std::move(*snapshot));
  return outputs.commit(std::move(contents), Mode::async);
}

}  // namespace muster::detail::session
