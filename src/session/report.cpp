// A report: reduces metrics over the workers, saves a checkpoint if there is something to save, gives the sinks a row,
// and stops the run if a worker was asked to.
#include "base/log.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "comm/on_ranks.hpp"
#include "gradients/reducer.hpp"
#include "muster/error.hpp"
#include "observe/metrics.hpp"
#include "session/session_state.hpp"
#include "session/validation.hpp"

#include <algorithm>
#include <ctime>
#include <utility>

namespace muster::detail::session {
namespace {

/// One worker's input to a report.
struct Contribution {
  Json metrics;
  bool has_state = false;
  bool has_files = false;
  bool asked_to_stop = false;
  bool writing = false;        ///< the last checkpoint is still being written
  bool has_callbacks = false;  ///< which may want to end training
  bool validation = false;     ///< a validation of the checkpoint is asked for
  std::string name = {};       ///< the checkpoint's name

  std::string pack() const {
    const auto bytes =
        Json::to_cbor({metrics, has_state, has_files, asked_to_stop, writing, has_callbacks, validation, name});
    return {bytes.begin(), bytes.end()};
  }
  static Contribution unpack(const std::string& bytes) {
    const auto fields = Json::from_cbor(bytes);
    return {fields[0], fields[1], fields[2], fields[3], fields[4], fields[5], fields[6], fields[7]};
  }
};

/// The metrics of each rank without their weights.
std::vector<Json> as_given(std::vector<Json> of_ranks) {
  for (auto& metrics : of_ranks)
    for (auto& [name, value] : metrics.items()) value = Json(std::move(value[0]));
  return of_ranks;
}

/// The row of the current report: the reduced metrics and the progress of training.
Json make_row(const TrainingProgress& counters, Json metrics, int world_size) {
  const double seconds = std::chrono::duration<double>(TrainingProgress::Clock::now() - counters.last_report).count();
  const auto samples = counters.steps->samples_since_report;
  Json row = std::move(metrics);
  row.emplace("epoch", counters.steps->epoch);  // unless the user reports one
  row["training_iteration"] = counters.training_iteration + 1;
  row["global_step"] = counters.steps->global_step;
  row["timestamp"] = static_cast<std::int64_t>(std::time(nullptr));
  row["time_this_iter_s"] = seconds;
  row["time_total_s"] = counters.total_seconds();
  row["num_samples"] = samples;
  row["samples_per_s"] = seconds > 0 ? static_cast<double>(samples) / seconds : 0.0;
  row["world_size"] = world_size;
  return row;
}

[[noreturn]] void refuse_state(const std::string& over, const char* what, const std::string& when) {
  throw Error(ExitCode::usage, "reporting with a state",
              "a pass over " + over + " is under way, and " + what + " cannot be saved",
              "Report with the state " + when);
}

/// Throws an Error if the positions of the open passes cannot be saved.
void require_positions(const step::Steps& steps) {
  if (const auto* pass = steps.find_unresumable_pass())
    pass->plan.is_stream() ? refuse_state("the stream \"" + pass->name + "\"", "its position", "after the pass")
                           : refuse_state("the data loader \"" + pass->name + "\"", "the position of its own sampler",
                                          "after the pass, or give the loader no sampler");
  const auto* const pass = steps.find_unsaved_pass();
  if (pass == nullptr) return;
  if (pass->is_of_earlier_epoch)
    refuse_state("\"" + pass->name + "\" that began in an earlier epoch", "its position",
                 "when it is over, begin it anew in each epoch, or begin it with .training = false or under "
                 "torch::NoGradGuard; session.step(batch) still weighs its batches");
  if (!pass->is_replaced)
    refuse_state((pass->plan.is_stream() ? "the stream \"" : "the dataset \"") + pass->name +
                     "\", which is whole on each worker,",
                 "its position",
                 "after the pass, split the dataset (DataConfig), or begin a pass that does not train with "
                 ".training = false or under torch::NoGradGuard");
  throw Error(ExitCode::usage, "reporting with a state",
              "two training passes over \"" + pass->name +
                  "\" are under way at once, and the position of only one of them can be saved",
              "Report with the state when both are over, give the trainer the same data under a second name and take "
              "one of the passes over that, or begin the inner pass with .training = false or under "
              "torch::NoGradGuard; session.step(batch) still weighs its batches");
}

}  // namespace

void SessionState::warn_of_unsplit_data(const std::vector<Json>& metrics) {
  if (data.has_warned_of_unsplit_data) return;
  std::string whole;
  for (const auto& [name, shard] : data.shards)
    if (!shard->options().split) whole += (whole.empty() ? "\"" : ", \"") + name + "\"";
  if (whole.empty()) return;
  const auto metric = observe::matrix_counted_by_all_ranks(metrics);
  if (metric.empty()) return;
  data.has_warned_of_unsplit_data = true;
  if (workers.is_first())
    log::warn(
        "reporting \"" + metric + "\": all " + std::to_string(workers.size()) +
        " workers have counted the same number of samples of each class. Datasets that are not split are whole on each "
        "worker, so each sample counts once per worker: " +
        whole + ". Set split_all in dataset_config (DataConfig), or name them in datasets_to_split");
}

std::int64_t SessionState::gradient_average_count() const {
  std::int64_t averaged = 0;
  for (const auto& prepared : models)
    if (const auto reducer = prepared->reducer()) averaged += reducer->averaged_pass_count();
  return averaged;
}

void SessionState::begin_epoch(std::int64_t epoch) {
  counters.unknown_data.averaged_before = gradient_average_count();
  data.pass_positions->begin_epoch(epoch);
}

bool SessionState::trains_on_unknown_data() const {
  const auto passes = data.pass_positions->epoch_progress();
  using EpochProgress = data::PassPositions::EpochProgress;
  if (passes != EpochProgress::none) return passes == EpochProgress::unknown;
  // There are datasets, but none has a training pass in this epoch, so they may not be meant for training.
  return counters.steps->in_loop && gradient_average_count() != counters.unknown_data.averaged_before;
}

/// If muster does not read the data itself, the first report in an epoch counts as the epoch's end, since most programs
/// report at the end of each epoch. Once a program has trained between two reports of one epoch, this is not assumed.
void SessionState::note_report_on_unknown_data(bool has_state) {
  auto& own = counters.unknown_data;
  own.is_mid_epoch = false;
  if (!counters.steps->in_loop || !trains_on_unknown_data()) return;
  const auto averaged = gradient_average_count();
  auto& kind = own.reports[has_state ? 1 : 0];
  const bool same_epoch = std::exchange(kind.epoch, counters.steps->epoch) == counters.steps->epoch;
  const bool trained = std::exchange(kind.averaged, averaged) != averaged || models.empty();
  const bool again = same_epoch && trained;
  own.is_mid_epoch = own.reports_within_epoch[has_state ? 1 : 0] = own.reports_within_epoch[has_state ? 1 : 0] || again;
  if (!again || !has_state || std::exchange(own.warned, true) || !workers.is_first()) return;
  log::warn(
      "a State is reported several times in an epoch whose data muster does not know, so the position in the data is "
      "not saved: a run that goes on from here begins the epoch again, and one that goes on from the first State of an "
      "epoch may leave out the rest of it. Take the data from get_dataset_shard() or prepare_data_loader(), whose "
      "position is saved, or report the State once, at the end of the epoch");
}

bool SessionState::is_epoch_complete() const {
  if (counters.is_between_epochs) return true;
  return trains_on_unknown_data() ? !counters.unknown_data.is_mid_epoch
                                  : data.pass_positions->epoch_progress() == data::PassPositions::EpochProgress::over;
}

void SessionState::report(const Metrics& metrics, const std::shared_ptr<const StateEntries>& entries,
                          const std::optional<Checkpoint>& files, const ReportOptions& options) {
  require_training("reporting");
  stop.shutdown_budget.reached_boundary();
  if (bad_numbers_watch) {
    bad_numbers_watch->require_watched(models);
    bad_numbers_watch->warn_of_skipped_steps();
  }
  if (entries) stop.last_state = entries;
  warn_of_unrestored_state(entries != nullptr);
  const auto& steps = *counters.steps;
  if (!steps.is_step_complete())
    throw Error(ExitCode::user_error, "reporting", "the step is not complete: more of its batches follow",
                "With virtual workers, report after the last batch of a step");

  std::vector<Contribution> all;
  for (const auto& bytes : comm::run_on_all(workers.control, [&] {
         if (entries) require_positions(steps);
         if (workers.is_first()) run.require_not_replaced();
         const auto& name = options.checkpoint_name;
         if (const auto fact = problem_with_name(name); fact && !name.empty())
           throw Error(ExitCode::usage, "naming a checkpoint \"" + name + "\"", *fact,
                       "Choose another checkpoint_name");
         return Contribution{.metrics = observe::to_json(outputs.callbacks.with_callback_metrics(metrics)),
                             .has_state = entries != nullptr,
                             .has_files = files.has_value(),
                             .asked_to_stop = is_asked_to_stop(),
                             .writing = outputs.store->is_saving(),
                             .has_callbacks = !outputs.callbacks.empty(),
                             .validation = options.validation,
                             .name = name}
             .pack();
       }))
    all.push_back(Contribution::unpack(bytes));
  using std::ranges::any_of;
  stop.request.merge(any_of(all, &Contribution::asked_to_stop));
  const bool has_state = any_of(all, &Contribution::has_state), has_files = any_of(all, &Contribution::has_files);
  if (has_state && !std::ranges::all_of(all, &Contribution::has_state))
    throw Error(ExitCode::user_error, "reporting", "some workers gave a state to save and others did not",
                "Give the same State to report() on every worker");

  if (!std::ranges::all_of(all, [&](const auto& one) { return one.name == all.front().name; }))
    throw Error(ExitCode::user_error, "reporting", "the workers give the checkpoint different names",
                "Give the same checkpoint_name on every worker");
  const bool validates = any_of(all, &Contribution::validation);
  if (validates && !(validation != nullptr && (has_state || has_files)))
    throw Error(ExitCode::usage, "reporting with a validation",
                validation != nullptr ? "there is no checkpoint to validate" : "the trainer has no validation function",
                validation != nullptr ? "Report a State or a Checkpoint" : "Give it one in TrainerOptions::validation");

  const bool busy = any_of(all, &Contribution::writing), wants_to_save = has_state || has_files;
  const bool saves = wants_to_save && !(busy && outputs.config.when_busy == WhenBusy::drop && !stop.request.is_known());
  if (stop.request.is_known())
    outputs.wait_for_save_and_warn();
  else if (saves || !busy)
    outputs.wait_for_save();

  for (const auto& prepared : models) prepared->synchronise_buffers();
  std::vector<Json> of_ranks;
  for (const auto& one : all) of_ranks.push_back(one.metrics);
  if (options.reduce) warn_of_unsplit_data(of_ranks);
  auto reduced = options.reduce ? observe::mean_over_ranks(of_ranks) : observe::list_over_ranks(of_ranks);
  Json row = make_row(counters, std::move(reduced), workers.size());
  row = Json::parse(workers.control.broadcast(row.dump(-1, ' ', false, Json::error_handler_t::replace)));

  take_up();
  note_report_on_unknown_data(entries != nullptr);
  outputs.check_score(row, saves && !validates, is_epoch_complete());
  ++counters.training_iteration;  // a report that was refused does not count
  outputs.callbacks.tell(&Callback::on_report, row);
  std::optional<Checkpoint> saved;
  if (saves) {
    if (!options.checkpoint_name.empty()) row["checkpoint_name"] = options.checkpoint_name;
    if (validates) row[checkpoint::status_name] = checkpoint::text_of(CheckpointStatus::pending_validation);
    saved = save(entries.get(), files, has_files, row);
    row["checkpoint_dir_name"] = saved->path().filename().string();
    if (bad_numbers_watch) bad_numbers_watch->note_checkpoint();
    if (entries) {
      counters.unfinished_pass.dataset = data.pass_positions->name_of_unfinished_pass();
      counters.unfinished_pass.step = steps.global_step;
    }
  }
  if (const auto cost = outputs.store->last_save_duration()) stop.shutdown_budget.note_save_duration(*cost);
  outputs.sinks.tell(&observe::Sink::report, row, counters.epoch_count);
  if (validation != nullptr && workers.is_first()) {
    validation->poll_results(
        [&](std::int64_t of, const Json& fields) { outputs.sinks.tell(&observe::Sink::validated, of, fields); });
    if (saved && validates) validation->request(*saved, counters.training_iteration);
  }
  outputs.callbacks.tell(&Callback::after_report, as_given(of_ranks), saved);
  counters.end_report();
  stop.has_reported_files = stop.has_reported_files || has_files;
  stop_if_asked_after_report(saves);
  if (any_of(all, &Contribution::has_callbacks)) end_if_callbacks_ask();
  stop.shutdown_budget.left_boundary();
}

}  // namespace muster::detail::session
