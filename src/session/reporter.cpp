#include "session/reporter.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"
#include "observe/metrics.hpp"
#include "observe/rank_times.hpp"
#include "session/validation_requests.hpp"
#include "state/stateful.hpp"
#include "watch/host_load.hpp"
#include "watch/time_use.hpp"

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
  bool has_files = false;
  bool asked_to_stop = false;
  bool writing = false;           ///< the last checkpoint is still being written
  bool has_callbacks = false;     ///< which may want to end training
  bool validation = false;        ///< a validation of the checkpoint is asked for
  std::string name = {};          ///< the checkpoint's name
  observe::RankTimes times = {};  ///< since the last report
  std::int64_t memory_bytes = 0;
  Json passes = {};  ///< as of SamePasses::noted()
  std::int64_t global_step = 0;
  Json rates = {};  ///< optim::LastRates

  std::string pack() const {
    return json_to_cbor({metrics, has_state, has_files, asked_to_stop, writing, has_callbacks, validation, name,
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

/// The metrics of each rank without their weights.
std::vector<Json> without_weights(std::vector<Json> of_ranks) {
  for (auto& metrics : of_ranks)
    for (auto& [name, value] : metrics.items()) value = Json(std::move(value[0]));
  return of_ranks;
}

/// Throws an Error if two ranks have stepped with other learning rates, so that their weights drift apart. A rank that
/// has left its loop early has taken fewer steps, and fewer of its schedule. NaN on all ranks is no difference.
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
                      "that of parameter group " + std::to_string(i - 1) + " of optimizer " +
                          std::to_string(optimizer) + " is " + of_first.dump() + " on rank 0 and " + of_rank.dump() +
                          " on rank " + std::to_string(rank),
                      "Give schedulers the same value on every rank, as in session.mean(loss)");
    }
}

/// Takes this worker's times since they were taken for the last report.
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

/// The row of the current report: the reduced metrics and the progress of training.
Json with_progress(Json metrics, const TrainingProgress& progress, int world_size) {
  const double seconds = std::chrono::duration<double>(TrainingProgress::Clock::now() - progress.last_report).count();
  const auto samples = progress.steps->samples_since_report;
  Json row = std::move(metrics);
  row.emplace("epoch", progress.steps->epoch);  // unless the user reports one
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

void Reporter::begin(bool has_state) {
  session_.stopper.begin_report();
  if (session_.bad_numbers) {
    session_.bad_numbers->require_watched(session_.models.all());
    session_.bad_numbers->warn_of_skipped_steps();
  }
  session_.resumer.warn_of_unrestored_state(has_state);
  if (!session_.progress.steps->is_step_complete())
    throw Error(ExitCode::user_error, "reporting", "the step is not complete: more of its batches follow",
                "With virtual workers, report after the last batch of a step");
}

Reporter::Combined Reporter::exchange(const Input& input) {
  const auto& workers = session_.workers;
  const auto& options = input.options;
  const auto& name = options.checkpoint_name;
  std::vector<Contribution> of_ranks;
  for (const auto& bytes : comm::run_on_all(workers.control, [&] {
         if (input.entries) require_positions(*session_.progress.steps);
         if (workers.is_first()) session_.run.require_not_replaced();
         if (const auto fact = problem_with_name(name); fact && !name.empty())
           throw Error(ExitCode::usage, "naming a checkpoint \"" + name + "\"", *fact,
                       "Choose another checkpoint_name");
         return Contribution{.metrics = observe::to_json(input.metrics),
                             .has_state = input.entries != nullptr,
                             .has_files = input.files.has_value(),
                             .asked_to_stop = session_.stopper.is_asked_here(),
                             .writing = session_.outputs.store->is_saving(),
                             .has_callbacks = !session_.outputs.observers.callbacks().empty(),
                             .validation = options.validation,
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
  Combined all{.has_state = any_of(of_ranks, &Contribution::has_state),
               .has_files = any_of(of_ranks, &Contribution::has_files),
               .validates = any_of(of_ranks, &Contribution::validation),
               .is_saving = any_of(of_ranks, &Contribution::writing),
               .has_callbacks = any_of(of_ranks, &Contribution::has_callbacks)};
  if (all.has_state && !std::ranges::all_of(of_ranks, &Contribution::has_state))
    throw Error(ExitCode::user_error, "reporting", "some workers gave a state to save and others did not",
                "Give the same State to report() on every worker");
  if (any_of(of_ranks, [&](const auto& one) { return one.name != of_ranks.front().name; }))
    throw Error(ExitCode::user_error, "reporting", "the workers give the checkpoint different names",
                "Give the same checkpoint_name on every worker");
  const bool can_validate = session_.outputs.validation != nullptr;
  if (all.validates && !(can_validate && (all.has_state || all.has_files)))
    throw Error(ExitCode::usage, "reporting with a validation",
                can_validate ? "there is no checkpoint to validate" : "the trainer has no validation function",
                can_validate ? "Report a State or a Checkpoint" : "Give it one in TrainerOptions::validation");
  std::vector<std::int64_t> steps;
  for (const auto& one : of_ranks) steps.push_back(one.global_step);
  warn_of_different_steps(steps);
  require_same_rates(of_ranks);
  for (auto& one : of_ranks) {
    all.metrics.push_back(std::move(one.metrics));
    all.times.push_back(one.times);
    all.memory_bytes.push_back(one.memory_bytes);
  }
  return all;
}

/// `steps`: of each rank. They differ if a pass trains on some ranks only, and if ranks leave their loops early.
void Reporter::warn_of_different_steps(const std::vector<std::int64_t>& steps) {
  const auto other = std::ranges::find_if(steps, [&](auto count) { return count != steps.front(); });
  if (other == steps.end() || std::exchange(has_warned_of_steps_, true) || !session_.workers.is_first()) return;
  log::warn("reporting: rank 0 has taken " + std::to_string(steps.front()) + " training steps and rank " +
            std::to_string(other - steps.begin()) + " " + std::to_string(*other) +
            ". Unless ranks leave their loops early on purpose, make the same training passes on all ranks: without "
            ".training = false or torch::NoGradGuard on some of them");
}

/// Where all ranks train, validations end after training, and no callback can decide by what they give.
void Reporter::require_own_metrics(const Json& row) const {
  comm::run_on_root(session_.workers.control, [&] {  // the first worker's callbacks know the validations
    if (!session_.epoch_end.is_complete()) return;   // a later report of this epoch may have the metric
    if (const auto metric = session_.outputs.observers.callbacks().awaited_metric(row); !metric.empty())
      throw Error(ExitCode::usage, "deciding by \"" + metric + "\" when training ends",
                  "this report does not have it, and as all ranks train, its validation ends only after training",
                  "Leave ranks free, as with --workers, or report it with every checkpoint that is to be validated");
  });
}

bool Reporter::wait_for_save_before(const Combined& all) {
  auto& outputs = session_.outputs;
  const bool stops = session_.stopper.is_known();
  const bool saves =
      (all.has_state || all.has_files) && !(all.is_saving && outputs.config.when_busy == WhenBusy::drop && !stops);
  if (stops)
    outputs.wait_for_save_and_warn();
  else if (saves || !all.is_saving)
    outputs.wait_for_save();
  return saves;
}

Json Reporter::make_row(const Combined& all, bool reduce) {
  const auto& workers = session_.workers;
  if (reduce) session_.data.warn_of_unsplit_data(all.metrics, workers);
  auto metrics = reduce ? observe::mean_over_ranks(all.metrics) : observe::list_over_ranks(all.metrics);
  auto row = with_progress(std::move(metrics), session_.progress, workers.size());
  row["rank_times"] = observe::summary_of(all.times);
  row["memory_bytes"] = observe::summary_of(all.memory_bytes);
  if (session_.late_ranks)
    if (const auto& late = session_.late_ranks->found(); !late.empty()) row["late_ranks"] = late;
  return json_from_text(workers.control.broadcast(json_text_lossy(row)));
}

void Reporter::log_histograms() {
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

Checkpoint Reporter::save(const Input& input, const Combined& all, Json& row) {
  auto& progress = session_.progress;
  if (!input.options.checkpoint_name.empty()) row["checkpoint_name"] = input.options.checkpoint_name;
  const auto saved = session_.saver.save({.entries = input.entries.get(),
                                          .files = all.has_files ? &input.files : nullptr,
                                          .row = row,
                                          .must_wait = session_.stopper.is_known(),
                                          .leaves_out_state = session_.stopper.last_state() != nullptr});
  row["checkpoint_dir_name"] = saved.path().filename().string();
  if (session_.bad_numbers) session_.bad_numbers->note_checkpoint();
  if (input.entries) {
    session_.gradients.watch(*input.entries);
    // Operators change their own entries, such as the history of calls, after their reports.
    if (progress.steps->call < 0) session_.saved_values.note(input.entries);
    progress.unfinished_pass.dataset = session_.data.pass_positions->name_of_unfinished_pass();
    progress.unfinished_pass.step = progress.steps->global_step;
  }
  return saved;
}

void Reporter::publish(const Json& row, const std::optional<Checkpoint>& to_validate) {
  auto& outputs = session_.outputs;
  outputs.observers.tell(&observe::Observer::report, row, session_.progress.epoch_count);
  if (outputs.validation == nullptr || !session_.workers.is_first()) return;
  if (to_validate) outputs.validation->request(*to_validate, session_.progress.training_iteration);
}

/// Tells of validations that have ended, which callbacks may answer with an exception.
void Reporter::poll_validations() {
  auto& outputs = session_.outputs;
  if (outputs.validation != nullptr && session_.workers.is_first())
    outputs.validation->poll_results(outputs.row_updater());
}

/// What a report changes before its checkpoint is committed, as it was before.
struct Reporter::Before {
  TrainingProgress progress;
  EpochEnd epoch_end;
  std::int64_t complete_epoch = -1;
  bool score_reported = false;
  std::filesystem::path newest = {};                  ///< the newest checkpoint
  std::vector<std::function<void()>> schedules = {};  ///< each sets back an optimizer or a scheduler of the State
};

void Reporter::make(const Input& input, Before& before, Made& report) {
  auto& outputs = session_.outputs;
  const auto& control = session_.workers.control;
  auto& all = report.all;
  all = exchange(input);
  auto& row = report.row;
  report.saves = wait_for_save_before(all);
  if (outputs.newest) before.newest = outputs.newest->path();
  // Asked for only now, since the save before may have failed.
  if (all.has_callbacks)
    all.metrics = comm::run_on_all(
        control, [&] { return observe::to_json(outputs.observers.callbacks().with_callback_metrics(input.metrics)); });
  session_.models.synchronise_buffers();
  row = make_row(all, input.options.reduce);
  const bool is_validated = report.saves && all.validates;
  if (is_validated) row[checkpoint::status_name] = checkpoint::text_of(CheckpointStatus::pending_validation);

  session_.resumer.take_up();
  session_.epoch_end.note_report(input.entries != nullptr);
  outputs.check_score(row, report.saves && !all.validates, session_.epoch_end.is_complete());
  if (is_validated && all.has_callbacks && !outputs.validation->run_beside_training()) require_own_metrics(row);
  ++session_.progress.training_iteration;
  if (all.has_callbacks)
    comm::run_on_all(control, [&] { outputs.observers.tell(&observe::Observer::report_begins, row); });
  if (!report.saves) return;
  report.has_begun_to_save = true;
  report.saved = save(input, all, row);
}

/// True if a report that has thrown has committed its checkpoint: a callback has thrown after that.
bool Reporter::has_committed(const Before& before) const {
  const auto& newest = session_.outputs.newest;
  return newest && newest->path() != before.newest;
}

void Reporter::set_back(const Before& before) noexcept {
  auto& outputs = session_.outputs;
  session_.progress = before.progress;
  session_.progress.steps->complete_epoch = before.complete_epoch;
  session_.epoch_end.set_back(before.epoch_end);
  outputs.score_reported = before.score_reported;
  for (const auto& set_back_schedule : before.schedules) set_back_schedule();
  outputs.observers.tell_and_log_errors("a report that has failed", &observe::Observer::report_failed);
}

void Reporter::report(const Input& input) {
  begin(input.entries != nullptr);
  session_.outputs.observers.callbacks().begin_report();
  Before before{.progress = session_.progress,
                .epoch_end = session_.epoch_end,
                .complete_epoch = session_.progress.steps->complete_epoch,
                .score_reported = session_.outputs.score_reported};
  if (session_.outputs.newest) before.newest = session_.outputs.newest->path();
  if (const auto entries = input.entries ? input.entries : session_.stopper.last_state())
    for (const auto& [name, entry] : *entries)
      if (auto set_back_schedule = entry.object()->keep_schedule())
        before.schedules.push_back(std::move(set_back_schedule));
  Made report;
  try {
    make(input, before, report);
  } catch (...) {
    if (report.has_begun_to_save && has_committed(before)) {
      report.row["checkpoint_dir_name"] = session_.outputs.newest->path().filename().string();
      if (input.entries) session_.stopper.note_state(input.entries);
      // What an observer throws here is logged, so that it does not hide the error of the report.
      session_.outputs.observers.tell_and_log_errors("a report", &observe::Observer::report, report.row,
                                                     session_.progress.epoch_count);
      session_.progress.end_report();
    } else {
      set_back(before);
    }
    throw;
  }
  const auto& all = report.all;
  const auto& saved = report.saved;
  if (input.entries) session_.stopper.note_state(input.entries);
  if (session_.late_ranks) session_.late_ranks->forget_found();
  log_histograms();
  publish(report.row, all.validates ? saved : std::nullopt);
  session_.progress.end_report();
  if (all.has_callbacks)
    comm::run_on_all(session_.workers.control, [&] {
      poll_validations();
      session_.outputs.observers.tell(&observe::Observer::report_ended, without_weights(all.metrics), saved);
    });
  else
    poll_validations();

  session_.stopper.stop_if_asked_after_report(
      {.saved = report.saves, .had_state = all.has_state, .had_files = all.has_files});
  if (all.has_callbacks) session_.callback_end.check();
  session_.stopper.end_report();
}

}  // namespace muster::detail::session
