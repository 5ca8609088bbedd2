// A report: metrics over the workers, a checkpoint if there is something to save, a row in the run's files.
#include "base/log.hpp"
#include "checkpoint/state/collect.hpp"
#include "checkpoint/state/merge.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"
#include "observe/metrics.hpp"
#include "train/random.hpp"
#include "train/session_state.hpp"

#include <algorithm>
#include <ctime>
#include <utility>

namespace muster::detail::train {
namespace {

/// What one worker brings to a report.
struct Contribution {
  Json metrics;
  bool saves_state = false;
  bool saves_files = false;
  bool stop = false;

  std::string pack() const {
    const auto bytes = Json::to_cbor({metrics, saves_state, saves_files, stop});
    return {bytes.begin(), bytes.end()};
  }
  static Contribution unpack(const std::string& bytes) {
    const auto fields = Json::from_cbor(bytes);
    return {fields[0], fields[1], fields[2], fields[3]};
  }
};

bool any(const std::vector<Contribution>& parts, bool Contribution::*flag) {
  return std::any_of(parts.begin(), parts.end(), [&](const Contribution& part) { return part.*flag; });
}

}  // namespace

Json SessionState::make_row(Json metrics) const {
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - last_report).count();
  Json row = std::move(metrics);
  row.emplace("epoch", epoch);  // the user's own wins
  row["training_iteration"] = training_iteration;
  row["global_step"] = global_step;
  row["timestamp"] = static_cast<std::int64_t>(std::time(nullptr));
  row["time_this_iter_s"] = seconds;
  row["time_total_s"] = time_before + std::chrono::duration<double>(now - begin).count();
  row["num_samples"] = samples_since_report;
  row["samples_per_s"] = seconds > 0 ? static_cast<double>(samples_since_report) / seconds : 0.0;
  row["world_size"] = workers.size();
  return row;
}

void SessionState::report(const Metrics& metrics, const StateEntries* entries, const std::optional<Checkpoint>& files,
                          const ReportOptions& options) {
  tell_beginning(entries != nullptr);

  if (!passes->complete_steps())
    throw Error(ExitCode::user_error, "reporting", "the step is not complete: other shards of it are to come",
                "With virtual workers, report after the last batch of a step");

  std::vector<Contribution> parts;
  for (const auto& bytes : comm::on_all(control, [&] {
         if (const auto* loader = passes->without_position(); entries != nullptr && loader != nullptr)
           throw Error(ExitCode::usage, "reporting with a state",
                       "a pass over the data loader \"" + loader->name +
                           "\" is under way, and where its own sampler stands cannot be saved",
                       "Report with the state after the pass, or give the loader no sampler");
         return Contribution{observe::to_json(metrics), entries != nullptr, files.has_value(), launch.stop_requested()}
             .pack();
       }))
    parts.push_back(Contribution::unpack(bytes));
  stop.hear(any(parts, &Contribution::stop));
  const bool saves_state = any(parts, &Contribution::saves_state);
  if (!std::all_of(parts.begin(), parts.end(),
                   [&](const Contribution& part) { return part.saves_state == saves_state; }))
    throw Error(ExitCode::user_error, "reporting", "some workers gave a state to save and others did not",
                "Give the same State to report() on every worker");

  for (const auto& prepared : models) prepared->synchronise_buffers();
  ++training_iteration;
  std::vector<Json> all_metrics;
  for (const auto& part : parts) all_metrics.push_back(part.metrics);
  Json row = make_row(options.reduce ? observe::mean_over_ranks(all_metrics) : observe::list_over_ranks(all_metrics));
  row = Json::parse(control.broadcast(row.dump(-1, ' ', false, Json::error_handler_t::replace)));

  const bool saves_files = any(parts, &Contribution::saves_files), saves = saves_state || saves_files;
  check_score(row, saves);
  if (saves) row["checkpoint_dir_name"] = save(entries, files, saves_files, row).path().filename().string();

  sinks.tell(&observe::Sink::report, row, epochs);
  samples_since_report = 0;
  last_report = Clock::now();
  files_reported = files_reported || saves_files;
  if (stop.known()) saves ? throw_stopped(true) : try_to_stop(true);
}

void SessionState::check_score(const Json& row, bool saves) {
  const auto& attribute = config.checkpoint_config.checkpoint_score_attribute;
  if (attribute.empty()) return;
  const auto at = row.find(attribute);
  const bool there = at != row.end() && (at->is_number() || at->is_null());  // NaN is null
  score_reported = score_reported || there;
  if (!saves || there) return;
  const std::string doing = "keeping the best checkpoints by \"" + attribute + "\"";
  if (at != row.end()) throw Error(ExitCode::usage, doing, "it is reported and is not a number", "Report a number");
  // In the middle of an epoch it may be yet to come, as what is measured at its end.
  if (!score_reported && passes->epoch_complete()) {
    std::string names;
    for (const auto& [name, value] : row.items()) names += (names.empty() ? "" : ", ") + name;
    throw Error(ExitCode::usage, doing, "no such metric is reported",
                "Choose one of " + names + ", or report it with every checkpoint, as NaN where it is not known");
  }
  if (!std::exchange(score_missed, true) && root())
    log::warn(doing + ": it is not reported with this checkpoint, which counts as the worst");
}

Checkpoint SessionState::save(const StateEntries* entries, const std::optional<Checkpoint>& files, bool any_files,
                              const Json& row) {
  checkpoint::Contents contents{.state = {},
                                .random_state = save_random_state(),
                                .directory = {},
                                .progress = save_progress(!row.empty()),  // a stop between reports has none
                                .metrics = row,
                                .metadata = metadata};
  if (entries != nullptr) {
    contents.state = checkpoint::collect(*entries);
    contents.replication = checkpoint::replication_of(*entries);
  }
  if (files) contents.directory = files->path();
  if (any_files) {
    // What a checkpoint made by from_dict holds becomes part of this one.
    for (auto given = checkpoint::merge_entries(control, files); const auto& [name, value] : given.values.items()) {
      if (contents.state.values.contains(name)) {
        if (root())
          log::warn("saving the entry " + name + ": the state and the checkpoint hold one; the state's is kept");
        continue;
      }
      contents.state.values[name] = value;
      contents.state.tensors.merge(checkpoint::only(given, name).tensors);
    }
  }
  newest = store.commit(contents);
  sinks.tell(&observe::Sink::checkpoint, *newest);
  return *newest;
}

}  // namespace muster::detail::train
