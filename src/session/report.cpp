// A report: reduces metrics over the workers, saves a checkpoint if there is something to save, gives the observers a
// row, and stops the run if a worker was asked to stop.
#include "base/json.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"
#include "observe/metrics.hpp"
#include "observe/rank_times.hpp"
#include "session/session_state.hpp"
#include "session/validation.hpp"
#include "state/stateful.hpp"
#include "watch/host_load.hpp"
#include "watch/record.hpp"
#include "watch/time_use.hpp"
#include "watch/trace.hpp"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::session {
namespace {

/// One worker's input to a report.
struct Contribution {
  Json metrics;
  bool has_state = false;
  bool has_checkpoint = false;  ///< true if the worker gives a Checkpoint of the program's own
  bool asked_to_stop = false;
  bool is_saving = false;         ///< true if the last checkpoint is still being written
  bool has_callbacks = false;     ///< true if the worker has callbacks
  bool validates = false;         ///< ReportOptions::validation: the checkpoint is to be validated
  std::string name = {};          ///< ReportOptions::checkpoint_name
  observe::RankTimes times = {};  ///< since the last report
  std::int64_t memory_bytes = 0;
  Json passes = {};  ///< options of the passes that were not compared yet: SamePasses::noted()
  std::int64_t global_step = 0;
  Json rates = {};  ///< learning rates: optim::LastRates

  std::string pack() const {
    return json_to_cbor({metrics, has_state, has_checkpoint, asked_to_stop, is_saving, has_callbacks, validates, name,
                         times.compute, times.wait, times.data, times.save, memory_bytes, passes, global_step, rates});
  }
  static Contribution unpack(const std::string& bytes) {
    const auto fields = json_from_cbor(bytes);
    return {fields[0],  fields[1],  fields[2],
            fields[3],  fields[4],  fields[5],
            fields[6],  fields[7],  {fields[8], fields[9], fields[10], fields[11]},
            fields[12], fields[13], fields[14],
            fields[15]};
  }
};

/// Returns the values of each rank's metrics, which are given as [value, weight] or [value, weight, accumulator].
std::vector<Json> without_weights(std::vector<Json> of_ranks) {
  for (auto& metrics : of_ranks)
    for (auto& [name, value] : metrics.items()) value = Json(std::move(value[0]));
  return of_ranks;
}

/// Throws an Error if two ranks have stepped with different learning rates, since their weights would drift apart.
/// Optimizers with different numbers of steps are not compared: a rank may have left its loop early. NaN on both ranks
/// counts as equal.
void require_same_rates(const std::vector<Contribution>& of_ranks) {
  const auto& first = of_ranks.front().rates;
  for (std::size_t rank = 1; rank < of_ranks.size(); ++rank)
    for (std::size_t optimizer = 0; optimizer < std::min(first.size(), of_ranks[rank].rates.size()); ++optimizer) {
      const auto &mine = first[optimizer], &theirs = of_ranks[rank].rates[optimizer];
      if (mine.empty() || theirs.empty() || mine[0] != theirs[0]) continue;
      for (std::size_t i = 1; i < std::min(mine.size(), theirs.size()); ++i)
        if (const auto of_first = state::value_to_json(mine[i].get<double>()),
            of_rank = state::value_to_json(theirs[i].get<double>());
            of_first != of_rank)
          throw Error(ExitCode::user_error, "comparing the learning rates on all ranks",
                      str("that of parameter group ", i - 1, " of optimizer ", optimizer, " is ", of_first.dump(),
                          " on rank 0 and ", of_rank.dump(), " on rank ", rank),
                      "Give schedulers the same value on every rank, as in session.mean(loss)");
    }
}

/// Returns this worker's times since the last call.
observe::RankTimes take_times(TrainingProgress& progress) {
  using Seconds = std::chrono::duration<double>;
  const auto now = TrainingProgress::Clock::now();
  const auto all = watch::time_use();
  const auto use = all - std::exchange(progress.times_taken, all);
  const auto elapsed = now - std::exchange(progress.times_taken_at, now);
  return {.compute = Seconds(elapsed - use.sum()).count(),
          .wait = Seconds(use.wait).count(),
          .data = Seconds(use.data).count(),
          .save = Seconds(use.save).count()};
}

/// Returns the row of the current report: the reduced metrics and how far training has come.
Json with_progress(Json metrics, const TrainingProgress& progress, int world_size) {
  const double seconds = std::chrono::duration<double>(TrainingProgress::Clock::now() - progress.last_report).count();
  const auto samples = progress.steps->samples_since_report;
  Json row = std::move(metrics);
  row.emplace("epoch", progress.steps->epoch.number);  // unless the user reports one
  row["training_iteration"] = progress.training_iteration + 1;
  row["global_step"] = progress.steps->global_step;
  row["timestamp"] = static_cast<std::int64_t>(std::time(nullptr));
  row["time_this_iter_s"] = seconds;
  row["time_total_s"] = progress.total_seconds();
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

/// Throws an Error if the position of an open pass cannot be saved.
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

/// Begins a report, and gives warnings that are due. Throws an Error if no report may be made now.
void require_reportable(SessionState& session, bool has_state) {
  session.stopper.begin_report();
  if (session.bad_numbers) {
    session.bad_numbers->require_watched(session.models.all());
    session.bad_numbers->warn_of_skipped_steps();
  }
  session.resumer.warn_of_unrestored_state(has_state);
  if (!session.progress.steps->is_step_complete())
    throw Error(ExitCode::user_error, "reporting", "the step is not complete: more of its batches follow",
                "With virtual workers, report after the last batch of a step");
}

/// What a report changes before its checkpoint is committed, copied so that it can be undone.
struct UndoData {
  TrainingProgress progress;
  EpochEnd epoch_end;
  std::int64_t last_complete = -1;
  bool score_reported = false;
  std::filesystem::path newest = {};  ///< path of the newest checkpoint
  /// Each function sets an optimizer or a scheduler of the State back to its schedule before the report.
  std::vector<std::function<void()>> schedules = {};
};

UndoData before_report(const SessionState& session, const std::shared_ptr<const StateEntries>& reported) {
  UndoData before{.progress = session.progress,
                  .epoch_end = session.epoch_end,
                  .last_complete = session.progress.steps->epoch.last_complete,
                  .score_reported = session.outputs.score_reported};
  if (session.outputs.newest) before.newest = session.outputs.newest->path();
  if (const auto entries = reported ? reported : session.stopper.last_state())
    for (const auto& [name, entry] : *entries)
      if (auto set_back_schedule = entry.object()->keep_schedule())
        before.schedules.push_back(std::move(set_back_schedule));
  return before;
}

/// What all workers together have given to a report; the same on each of them.
struct CombinedInput {
  std::vector<Json> metrics = {};  ///< [ranks]: observe::to_json(Metrics)
  bool has_state = false;
  bool has_checkpoint = false;  ///< true if any worker gives a Checkpoint of the program's own
  bool validates = false;
  bool is_saving = false;  ///< true if the last checkpoint is still being written
  bool has_callbacks = false;
  std::vector<observe::RankTimes> times = {};   ///< [ranks], since the last report
  std::vector<std::int64_t> memory_bytes = {};  ///< [ranks]: watch::memory_bytes()
};

/// Makes one report. It uses every part of the session.
class Report {
 public:
  Report(SessionState& session, const ReportInput& input)
      : session_(session), input_(input), before_(before_report(session, input.entries)) {}

  /// Makes the report, and ends the attempt if it must. Collective.
  void make();

 private:
  /// Checks the input of all workers and combines it. Collective.
  CombinedInput exchange();
  /// Throws an Error if a callback decides by a metric that only a validation after training would give. Collective.
  void require_own_metrics() const;
  /// Waits for the save in the background, if this report must come after it. True if this report saves a checkpoint.
  /// Collective.
  bool wait_for_save_before();
  /// Returns the row of this report, the same on all workers. Collective.
  Json make_row();
  /// Gives the observers the values of all parameters and gradients, if a histogram is due. Collective.
  void log_histograms();
  /// Saves, and puts the checkpoint's name into the row. Collective.
  Checkpoint save();
  /// Does everything of a report up to the save. If this fails, make() undoes it. Collective.
  void try_to_make();
  bool has_committed() const;
  /// Undoes what this report has changed.
  void set_back() noexcept;
  /// Gives the observers the row, and requests the validation.
  void announce();
  /// Tells the observers about validations that have ended. A callback may throw then.
  void poll_validations();

  SessionState& session_;
  const ReportInput& input_;
  UndoData before_;
  CombinedInput combined_ = {};
  Json row_ = {};
  bool saves_ = false;
  bool has_begun_to_save_ = false;  ///< true if this report's own save has begun
  std::optional<Checkpoint> saved_ = {};
};

CombinedInput Report::exchange() {
  const auto& workers = session_.workers;
  const auto& options = input_.options;
  const auto& name = options.checkpoint_name;
  std::vector<Contribution> of_ranks;
  for (const auto& bytes : comm::run_on_all(workers.control, [&] {
         if (input_.entries) require_positions(*session_.progress.steps);
         if (workers.is_first()) session_.run.require_not_replaced();
         if (const auto fact = problem_with_name(name); fact && !name.empty())
           throw Error(ExitCode::usage, "naming a checkpoint \"" + name + "\"", *fact,
                       "Choose another checkpoint_name");
         return Contribution{.metrics = observe::to_json(input_.metrics),
                             .has_state = input_.entries != nullptr,
                             .has_checkpoint = input_.checkpoint.has_value(),
                             .asked_to_stop = session_.stopper.is_asked_here(),
                             .is_saving = session_.outputs.store->background().is_running(),
                             .has_callbacks = !session_.outputs.observers.callbacks().empty(),
                             .validates = options.validation,
                             .name = name,
                             .times = take_times(session_.progress),
                             .memory_bytes = watch::memory_bytes(),
                             .passes = session_.same_passes.noted(),
                             .global_step = session_.progress.steps->global_step,
                             .rates = *session_.models.last_rates()}
             .pack();
       }))
    of_ranks.push_back(Contribution::unpack(bytes));
  std::vector<Json> passes;
  for (const auto& one : of_ranks) passes.push_back(one.passes);
  require_same_passes(passes);
  session_.same_passes.forget();
  using std::ranges::any_of;
  session_.stopper.merge(any_of(of_ranks, &Contribution::asked_to_stop));
  CombinedInput all{.has_state = any_of(of_ranks, &Contribution::has_state),
                    .has_checkpoint = any_of(of_ranks, &Contribution::has_checkpoint),
                    .validates = any_of(of_ranks, &Contribution::validates),
                    .is_saving = any_of(of_ranks, &Contribution::is_saving),
                    .has_callbacks = any_of(of_ranks, &Contribution::has_callbacks)};
  if (all.has_state && !std::ranges::all_of(of_ranks, &Contribution::has_state))
    throw Error(ExitCode::user_error, "reporting", "some workers gave a state to save and others did not",
                "Give the same State to report() on every worker");
  if (any_of(of_ranks, [&](const auto& one) { return one.name != of_ranks.front().name; }))
    throw Error(ExitCode::user_error, "reporting", "the workers give the checkpoint different names",
                "Give the same checkpoint_name on every worker");
  const bool can_validate = session_.outputs.validation != nullptr;
  if (all.validates && !(can_validate && (all.has_state || all.has_checkpoint)))
    throw Error(ExitCode::usage, "reporting with a validation",
                can_validate ? "there is no checkpoint to validate" : "the trainer has no validation function",
                can_validate ? "Report a State or a Checkpoint" : "Give it one in TrainerOptions::validation");
  std::vector<std::int64_t> steps;
  for (const auto& one : of_ranks) steps.push_back(one.global_step);
  session_.same_passes.warn_of_different_steps(steps, workers.is_first());
  require_same_rates(of_ranks);
  for (auto& one : of_ranks) {
    all.metrics.push_back(std::move(one.metrics));
    all.times.push_back(one.times);
    all.memory_bytes.push_back(one.memory_bytes);
  }
  return all;
}

/// Called if validations run only after training: too late for a callback to decide by their metrics.
void Report::require_own_metrics() const {
  comm::run_on_root(session_.workers.control, [&] {  // only the first worker's callbacks learn of validations
    if (!session_.epoch_end.is_complete()) return;   // a later report of this epoch may have the metric
    if (const auto metric = session_.outputs.observers.callbacks().awaited_metric(row_); !metric.empty())
      throw Error(ExitCode::usage, "deciding by \"" + metric + "\" when training ends",
                  "this report does not have it, and its validation ends only after training, since all ranks train or "
                  "MPI allows no threads",
                  "Leave ranks free, as with --workers, or report it with every checkpoint that is to be validated");
  });
}

bool Report::wait_for_save_before() {
  auto& outputs = session_.outputs;
  const bool stops = session_.stopper.is_known();
  const bool saves = (combined_.has_state || combined_.has_checkpoint) &&
                     !(combined_.is_saving && outputs.config.when_busy == WhenBusy::drop && !stops);
  if (stops)
    outputs.wait_for_save_and_warn();
  else if (saves || !combined_.is_saving)
    outputs.wait_for_save();
  return saves;
}

Json Report::make_row() {
  const auto& workers = session_.workers;
  const bool reduce = input_.options.reduce;
  if (reduce) session_.data.warn_of_unsplit_data(combined_.metrics, workers);
  auto metrics = reduce ? observe::mean_over_ranks(combined_.metrics) : observe::list_over_ranks(combined_.metrics);
  auto row = with_progress(std::move(metrics), session_.progress, workers.size());
  row["rank_times"] = observe::summary_of(combined_.times);
  row["memory_bytes"] = observe::summary_of(combined_.memory_bytes);
  if (const auto ledgers = session_.data.ledgers(workers.control); !ledgers.empty()) row["live"] = ledgers;
  if (session_.late_ranks)
    if (const auto& late = session_.late_ranks->found(); !late.empty()) row["late_ranks"] = late;
  return json_from_text(workers.control.broadcast(json_text_lossy(row)));
}

void Report::log_histograms() {
  const int interval = session_.outputs.histogram_interval;
  if (interval == 0 || session_.progress.training_iteration % interval != 0) return;
  const auto log = [&](const std::string& name, const at::Tensor& values) {
    if (!session_.workers.is_first() || !values.defined() || values.numel() == 0) return;
    session_.outputs.observers.tell(&observe::Observer::histogram, name,
                                    values.is_sparse() ? values.coalesce().values() : values,
                                    session_.progress.shown_step(session_.progress.training_iteration));
  };
  session_.models.for_each_parameter([&](const auto& name, const auto& values, const auto& gradient) {
    log("weights/" + name, values);
    log("gradients/" + name, gradient);
  });
}

Checkpoint Report::save() {
  auto& progress = session_.progress;
  if (!input_.options.checkpoint_name.empty()) row_["checkpoint_name"] = input_.options.checkpoint_name;
  const auto saved = session_.saver.save({.entries = input_.entries.get(),
                                          .given = combined_.has_checkpoint ? &input_.checkpoint : nullptr,
                                          .row = row_,
                                          .must_wait = session_.stopper.is_known(),
                                          .leaves_out_state = session_.stopper.last_state() != nullptr});
  row_["checkpoint_dir_name"] = saved.path().filename().string();
  if (session_.bad_numbers) session_.bad_numbers->note_checkpoint();
  if (input_.entries) {
    session_.gradients.watch(*input_.entries);
    // Not for an operator's report: after it, the operator changes entries of its own, such as the history of calls.
    if (progress.steps->epoch.call < 0) session_.saved_values.note(input_.entries);
    progress.unfinished_pass.dataset = session_.data.pass_positions->name_of_unfinished_pass();
    progress.unfinished_pass.step = progress.steps->global_step;
  }
  return saved;
}

void Report::announce() {
  auto& outputs = session_.outputs;
  outputs.observers.tell(&observe::Observer::report, row_, session_.progress.epoch_count);
  if (outputs.validation == nullptr || !session_.workers.is_first()) return;
  if (combined_.validates && saved_) outputs.validation->request(*saved_, session_.progress.training_iteration);
}

void Report::poll_validations() {
  auto& outputs = session_.outputs;
  if (outputs.validation != nullptr && session_.workers.is_first())
    outputs.validation->poll_results(outputs.row_updater());
}

void Report::try_to_make() {
  auto& outputs = session_.outputs;
  const auto& control = session_.workers.control;
  combined_ = exchange();
  saves_ = wait_for_save_before();
  if (outputs.newest) before_.newest = outputs.newest->path();
  // The callbacks are asked for their metrics only now: wait_for_save_before() may throw, and a callback's metrics()
  // may change the callback.
  if (combined_.has_callbacks)
    combined_.metrics = comm::run_on_all(
        control, [&] { return observe::to_json(outputs.observers.callbacks().with_callback_metrics(input_.metrics)); });
  session_.models.synchronise_statistics();
  row_ = make_row();
  const bool is_validated = saves_ && combined_.validates;
  if (is_validated) row_[checkpoint::status_name] = checkpoint::text_of(CheckpointStatus::pending_validation);

  session_.resumer.confirm_start();
  session_.epoch_end.note_report(input_.entries != nullptr);
  outputs.check_score(row_, saves_ && !combined_.validates, session_.epoch_end.is_complete());
  if (is_validated && combined_.has_callbacks && !outputs.validation->runs_beside_training()) require_own_metrics();
  ++session_.progress.training_iteration;
  if (combined_.has_callbacks)
    comm::run_on_all(control, [&] { outputs.observers.tell(&observe::Observer::report_begins, row_); });
  if (!saves_) return;
  has_begun_to_save_ = true;
  saved_ = save();
}

/// For a report that has thrown: true if its checkpoint was committed before, so that a callback must have thrown.
bool Report::has_committed() const {
  const auto& newest = session_.outputs.newest;
  return newest && newest->path() != before_.newest;
}

void Report::set_back() noexcept {
  auto& outputs = session_.outputs;
  session_.progress = before_.progress;
  session_.progress.steps->epoch.last_complete = before_.last_complete;
  session_.epoch_end.set_back(before_.epoch_end);
  outputs.score_reported = before_.score_reported;
  for (const auto& set_back_schedule : before_.schedules) set_back_schedule();
  outputs.observers.tell_and_log_errors("a report that has failed", &observe::Observer::report_failed);
}

void Report::make() {
  try {
    try_to_make();
  } catch (...) {
    if (has_begun_to_save_ && has_committed()) {
      row_["checkpoint_dir_name"] = session_.outputs.newest->path().filename().string();
      if (input_.entries) session_.stopper.note_state(input_.entries);
      // Exceptions of observers are only logged here, so that the report's own error is thrown.
      session_.outputs.observers.tell_and_log_errors("a report", &observe::Observer::report, row_,
                                                     session_.progress.epoch_count);
      session_.progress.end_report();
    } else {
      set_back();
    }
    throw;
  }
  if (input_.entries) session_.stopper.note_state(input_.entries);
  if (session_.late_ranks) session_.late_ranks->forget_found();
  log_histograms();
  announce();
  session_.progress.end_report();
  if (combined_.has_callbacks)
    comm::run_on_all(session_.workers.control, [&] {
      poll_validations();
      session_.outputs.observers.tell(&observe::Observer::report_ended, without_weights(combined_.metrics), saved_);
    });
  else
    poll_validations();

  session_.stopper.stop_if_asked_after_report(
      {.saved = saves_, .had_state = combined_.has_state, .had_checkpoint = combined_.has_checkpoint});
  if (combined_.has_callbacks) session_.callback_end.check();
  session_.stopper.end_report();
}

}  // namespace

void SessionState::report(const ReportInput& input) {
  const watch::ScopedCallName report("report");
  const watch::TraceSpan span("report");
  require_training("reporting");
  if (profiler) profiler->write_if_over();
  require_reportable(*this, input.entries != nullptr);
  outputs.observers.callbacks().begin_report();
  Report(*this, input).make();
}

}  // namespace muster::detail::session
