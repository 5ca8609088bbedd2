#include "sweep/group.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/row_fields.hpp"
#include "base/text.hpp"
#include "comm/agreement.hpp"
#include "comm/on_ranks.hpp"
#include "comm/timeout.hpp"
#include "launch/part.hpp"
#include "launch/supervised.hpp"
#include "muster/callback.hpp"
#include "observe/history.hpp"
#include "session/stop.hpp"
#include "sweep/asha.hpp"
#include "sweep/folder.hpp"
#include "sweep/table.hpp"

#include <algorithm>
#include <functional>
#include <ranges>
#include <set>
#include <vector>

namespace muster::detail::sweep {
namespace {

/// Returns the names of the metrics in the rows that are numbers, such as "loss, accuracy", without the fields that
/// muster adds; empty if there are none.
std::string metrics_in(const std::vector<Json>& rows) {
  std::set<std::string> names;
  for (const auto& row : rows)
    for (const auto& [name, value] : row.items())
      if (value.is_number() && !is_row_field(name)) names.insert(name);
  return listed(std::vector(names.begin(), names.end()), 8, std::identity());
}

/// True if the report's validation is pending or has failed, so that a metric that the row lacks may be one of its own.
bool lacks_validation(const Json& row) {
  const auto status = row.is_object() ? row.value("checkpoint_status", Json()) : Json();
  return status == "pending_validation" || status == "validation_failed" || status == "validation_timeout";
}

/// Compares a trial with the others at its reports. Each worker has one as a callback; the first worker decides for
/// all.
class Comparison final : public Callback {
 public:
  /// `looks_for_metric`: set to false when the first report was checked for the metric.
  Comparison(const SweepWork& work, TrialQueue& queue, int trial, bool decides, bool& looks_for_metric)
      : work_(work), queue_(queue), trial_(trial), decides_(decides), looks_for_metric_(looks_for_metric) {
    compared_at_.resize(work.rungs.size());
    if (decides && !work.rungs.empty()) try {
        const auto rows = observe::History::read(work.folder / name_of(trial));
        for (const auto& one : comparisons_in(rows, work.rungs, work.options.metric, order_of(work.options)))
          compared_at_[one.rung] = one.iteration;
      } catch (const Error&) {
        // The rows are damaged, which the trial itself will report when it begins.
      }
  }

  void on_report(const Json& row) override {
    const auto& scheduler = work_.options.scheduler;
    if (decides_ && std::exchange(looks_for_metric_, false)) look_for_metric(row);
    if (!decides_ || !scheduler) return;
    is_at_max_t_ = is_at_max_t_ || row.at("training_iteration").get<std::int64_t>() >= scheduler->max_t;
    compare(row);
  }

  void on_validated(const Json& fields) override {
    if (decides_ && work_.options.scheduler && fields.at("training_iteration") > decided_) compare(fields);
  }

  bool should_stop() const override { return stopped_ || is_at_max_t_; }
  std::string decides_by() const override { return work_.rungs.empty() || decided_ > 0 ? "" : work_.options.metric; }
  // The checkpoint of the report at which a decision was made holds that decision.
  Json state() const override { return {{"stopped", stopped_}, {"over", is_at_max_t_}, {"decided", decided_}}; }
  void load_state(const Json& state) override {
    stopped_ = state.at("stopped");
    is_at_max_t_ = state.at("over");
    decided_ = state.value("decided", std::int64_t{0});
  }
  void on_start(Session&) override {
    stopped_ = is_at_max_t_ = false;
    decided_ = 0;
  }

  /// True if the trial was stopped since others were better.
  bool stopped() const noexcept { return stopped_; }
  /// True if the sweep has failed on another rank, so that no scores can be exchanged.
  bool cut_off() const noexcept { return cut_off_; }

 private:
  /// Compares the trial at the rung that it has reached with this report, if the row has the metric.
  void compare(const Json& row) {
    const auto iteration = row.at("training_iteration").get<std::int64_t>();
    const auto score = score_of(row, work_.options);
    // A trial is compared at each rung only once. But if it failed at that report, the report is repeated and compared
    // again.
    std::size_t next = 0;
    for (std::size_t rung = 0; rung < compared_at_.size(); ++rung)
      if (compared_at_[rung] > 0 && compared_at_[rung] < iteration) next = rung + 1;
    const auto rung = rung_at(work_.rungs, next, iteration);
    if (score) decided_ = std::max(decided_, iteration);
    if (!score || !rung) return;
    compared_at_[*rung] = iteration;
    try {
      std::vector<double> all;
      for (const auto& [trial, theirs] : queue_.add_score(*rung, trial_, *score)) all.push_back(theirs);
      stopped_ = stopped_ || !continues_after_rung(*score, all, work_.options.scheduler->reduction_factor);
    } catch (const RemoteError&) {
      cut_off_ = true;
    }
  }

  /// Warns if the metric is missing; it is no error, since a later report may have it.
  void look_for_metric(const Json& row) const {
    const auto& metric = work_.options.metric;
    if (metric.empty() || row.contains(metric)) return;
    if (row.value("checkpoint_status", Json()) == "pending_validation") return;  // the validation may give the metric
    const auto names = metrics_in({row});
    const log::Scope log;
    log::configure(0, log::level());  // into the sweep's log; a trial's own messages go only to its own log
    log::warn("comparing the trials: the first report of " + name_of(trial_) + " has no \"" + metric + "\"" +
              (names.empty() ? "" : ", but " + names) + ". SweepOptions::metric names a metric of session.report()");
  }

  const SweepWork& work_;
  TrialQueue& queue_;
  const int trial_;
  const bool decides_;
  bool& looks_for_metric_;
  /// [rung]: number of the report that was compared, in this start or an earlier one; 0 if none was.
  std::vector<std::int64_t> compared_at_;
  bool stopped_ = false, is_at_max_t_ = false, cut_off_ = false;
  std::int64_t decided_ = 0;  ///< number of the last report whose row or validation had the metric
};

class Group {
 public:
  Group(const SweepWork& work, TrialQueue& queue, const Communicator& ranks)
      : work_(work), queue_(queue), ranks_(ranks) {
    if (!leads()) return;
    stop_ = session::StopFile(work.folder / run_names::stop);
    stopping_ = session::StopFile(work.folder / stopping_file);
  }

  void run() {
    const log::Scope log;
    log::configure(leads() ? 0 : 1, log::level());  // only the group's first rank logs
    while (const auto trial = next())
      if (!run(*trial)) return;
  }

 private:
  bool leads() const noexcept { return ranks_.rank() == 0; }
  bool asked_to_stop() { return work_.launch.stop_requested() || stop_.exists() || stopping_.exists(); }
  void stop_all() const noexcept {
    if (leads()) ask_others_to_stop(work_.folder);
  }

  std::optional<int> next() {
    if (ranks_.all_reduce(std::int64_t{asked_to_stop()}, ReduceOp::max) != 0) return stop_all(), std::nullopt;
    const auto none = work_.to_do.size();
    const auto place = comm::run_on_root(ranks_, [&] {
      try {
        return std::min(queue_.next_index(), none);
      } catch (const RemoteError&) {  // the whole launch has failed, which this group's communicator does not tell
        return none;
      }
    });
    return place < none ? std::optional(work_.to_do[place]) : std::nullopt;
  }

  LaunchFlags flags_of(int number) const {
    auto flags = work_.launch.flags();
    flags.storage = work_.folder;
    flags.name = name_of(number);
    flags.resume = Resume::automatic;
    flags.seed = work_.seed + static_cast<std::uint64_t>(work_.trial_settings[static_cast<std::size_t>(number)].sample);
    flags.workers.reset();
    flags.progress = Progress::none;
    return flags;
  }

  /// Runs one trial. Returns false if the sweep should stop.
  bool run(int number) {
    auto trial = work_.trials[static_cast<std::size_t>(number)];
    trial.status = TrialStatus::running;
    trial.error.reset();
    auto lost_starts = work_.lost_starts[static_cast<std::size_t>(number)];
    comm::run_on_root(ranks_, [&] {
      lost_starts.furthest = points_of(trial.path);
      lost_starts.alone = work_.one_at_a_time;
      save_row(trial, lost_starts);
    });
    log::write_to_file_only(trial.name + " begins: " + json_text(trial.config));

    const auto comparison = std::make_shared<Comparison>(work_, queue_, number, leads(), looks_for_metric_);
    std::optional<Result> result;
    std::optional<Error> error;
    bool stopped = false, ended = false;
    try {
      const log::Scope log;
      log::configure(1, log::level());  // a trial logs only to its own file
      const launch::UnsupervisedScope unsupervised;
      Launch launch(work_.launch, {.ranks = ranks_,
                                   .flags = flags_of(number),
                                   .asked_to_stop = [&] { return asked_to_stop() || comparison->cut_off(); },
                                   .callbacks = {comparison}});
      const auto timeout = comm::timeout(ranks_);
      error = comm::attempt_on_all(ranks_, {.done = timeout, .failed = timeout},
                                   [&] { result = work_.trainable(launch, trial.config); });
      ended = error && error->code() == ExitCode::done;  // an operator's training that the comparison has ended
      if (ended) error.reset();
      if (!error && !ended) error = result->error;
      stopped = unsupervised.stopped_without_state();
    } catch (const comm::RanksMissing& lost) {
      throw comm::RanksMissing(Error(lost.code(), trial.name + ": " + lost.what()), lost.report_delay());
    }

    const bool asked = ranks_.all_reduce(std::int64_t{asked_to_stop() || comparison->cut_off()}, ReduceOp::max) != 0;

    // The group's first rank decides how the trial has ended.
    const bool ends = comm::run_on_root(ranks_, [&] {
      // A Trainable may throw ExitCode::done before its run exists; then the trial has no report.
      if (ended && std::filesystem::exists(status_of(trial.path / run_names::params))) try {
          result = Result::from_path(trial.path);
        } catch (const Error& damaged) {
          error = damaged;
        }
      stopped = stopped || (error && error->code() == ExitCode::stopped);
      trial.status = stopped                 ? TrialStatus::waiting
                     : error                 ? TrialStatus::failed
                     : comparison->stopped() ? TrialStatus::stopped
                                             : TrialStatus::done;
      if (trial.status == TrialStatus::failed) trial.error = error;
      if (result) {
        trial.metrics = row_to_compare(result->metrics, result->metrics_history, work_.options.metric);
        trial.checkpoint = result->checkpoint;
      }
      add_scores(number);
      save_row(trial);
      log_outcome(trial);
      if (has_ended_well(trial.status) && result) require_metric(trial);
      if (!stopped || asked || has_stopped_by_time(trial)) return stopped;
      // The trial was stopped for a reason of its own, so the other trials go on.
      if (error) log::warn(trial.name + ": " + error->what());
      return false;
    });
    if (ends) stop_all();
    return !ends;
  }

  /// True if the end of the launch's time may have stopped the trial's training. False if the launch has no end, or if
  /// training has finished and only validations are left.
  bool has_stopped_by_time(const Trial& trial) const {
    if (!work_.launch.time_left()) return false;
    const auto params = read_json_if_intact(trial.path / run_names::params);
    return !params.is_object() || params.value("finished", Json()) != true;
  }

  void save_row(const Trial& trial, const LostStarts& lost_starts = {}) const {
    write_trial(trial, lost_starts);
    if (work_.launch.rank() == 0) work_.refresh();
  }

  /// Adds the trial's scores at all rungs, as a new start of the sweep reads them: validations after training may have
  /// given some that Comparison has not seen.
  void add_scores(int number) const {
    if (!work_.rungs.empty()) try {
        const auto rows = observe::History::read(work_.folder / name_of(number));
        for (const auto& one : comparisons_in(rows, work_.rungs, work_.options.metric, order_of(work_.options)))
          queue_.add_score(one.rung, number, one.score);
      } catch (const Error&) {
        // Either the sweep has failed elsewhere, and next() notices that, or the rows are damaged, and the trial has
        // reported that.
      }
  }

  /// Throws an Error if a trial has ended and no trial has reported the metric as a number so far, since the other
  /// trials would train for nothing. NaN (null in a row) or a failed validation may be a matter of this trial only, so
  /// they count as the metric.
  void require_metric(const Trial& ended) const {
    const auto& metric = work_.options.metric;
    const auto has_metric = [&](const Json& row) {
      const auto value = row.is_object() ? row.find(metric) : row.end();
      return value != row.end() && (value->is_number() || value->is_null());
    };
    if (metric.empty() || has_metric(ended.metrics) || lacks_validation(ended.metrics)) return;
    std::vector<Json> rows;
    for (const auto& trial : work_.trials) try {
        auto reported = observe::History::read(trial.path);
        // A user's own Trainable may have added metrics to its Result.
        if (const auto row = read_trial(trial.path)) reported.push_back(row->metrics);
        for (auto& row : reported) {
          if (has_metric(row) || lacks_validation(row)) return;
          rows.push_back(std::move(row));
        }
      } catch (const Error&) {
        return;  // the rows are damaged, and the trial may have reported the metric
      }
    throw missing_metric(metric, rows);
  }

  void log_outcome(const Trial& trial) const {
    const auto text = one_line(trial, work_.options.metric);
    trial.status == TrialStatus::failed ? log::warn(text) : log::info(text);
  }

  const SweepWork& work_;
  TrialQueue& queue_;
  Communicator ranks_;
  session::StopFile stop_, stopping_;
  bool looks_for_metric_ = true;  ///< true until the group has checked its first report
};

}  // namespace

Error missing_metric(const std::string& metric, const std::vector<Json>& rows) {
  const auto names = metrics_in(rows);
  const auto but = names.empty() ? "" : ", but " + names;
  if (std::ranges::any_of(rows, [&](const Json& row) { return row.contains(metric); }))
    return Error(ExitCode::usage, "comparing the trials", "none has a number as its \"" + metric + "\"" + but,
                 "Report a number, which NaN and infinity are not, or name another metric");
  return Error(
      ExitCode::usage, "comparing the trials", "none has reported \"" + metric + "\"" + but,
      str("Name a metric of session.report() in SweepOptions::metric",
          std::ranges::any_of(rows, lacks_validation) ? ", or mend the validation, which has failed in some trials"
                                                      : ""));
}

void ask_others_to_stop(const std::filesystem::path& folder) noexcept {
  try {
    File(folder / stopping_file, File::Mode::append).close();
  } catch (const std::exception& error) {
    log::warn(str("asking the other trials to stop: ", error.what()));
  }
}

void run_trials(const SweepWork& work, TrialQueue& queue, const Communicator& ranks) {
  Group(work, queue, ranks).run();
}

}  // namespace muster::detail::sweep
