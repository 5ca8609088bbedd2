#include "base/json.hpp"
#include "base/log.hpp"
#include "muster/callbacks.hpp"
#include "muster/error.hpp"
#include "muster/state.hpp"
#include "state/stateful.hpp"

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

namespace muster {
namespace {

/// Reads a metric from each report, for a callback.
class WatchedMetric {
 public:
  WatchedMetric(std::string doing, std::string metric) : doing_(std::move(doing)), metric_(std::move(metric)) {
    if (metric_.empty()) throw Error(ExitCode::usage, doing_, "no metric is named", "Name a metric that is reported");
  }

  const std::string& metric() const noexcept { return metric_; }
  /// Returns the metric's value in `row`, NaN for null. If the row does not have it, warns once and returns none.
  /// Throws an Error if it is not a number.
  std::optional<double> value_in(const Json& row) {
    const auto at = row.find(metric_);
    if (at == row.end()) {
      if (!std::exchange(missed_, true))
        detail::log::warn(doing_ + ": \"" + metric_ + "\" is not in this report; such reports are ignored");
      return {};
    }
    if (at->is_null()) return std::numeric_limits<double>::quiet_NaN();
    if (!at->is_number())
      throw Error(ExitCode::usage, doing_ + " by \"" + metric_ + "\"", "its reported value is not a number",
                  "Report a number");
    return at->get<double>();
  }

 private:
  std::string doing_, metric_;
  bool missed_ = false;
};

class EarlyStopping final : public Callback {
 public:
  explicit EarlyStopping(const EarlyStoppingOptions& options)
      : options_(options), watched_("stopping early", options.metric) {
    if (!options.mode)
      throw Error(ExitCode::usage, "stopping early by \"" + options.metric + "\"",
                  "EarlyStoppingOptions::mode is not set",
                  "Give it ScoreOrder::min, as for a loss, or ScoreOrder::max");
    if (options.patience < 0 || !(options.min_delta >= 0))
      throw Error(ExitCode::usage, "stopping early", "patience and min_delta must be at least 0",
                  "Give other values, or leave them out");
  }

  void on_start(Session&) override {
    best_.reset();
    waited_ = 0;
    counted_ = 0;
  }
  void on_report(const Json& row) override {
    const bool is_awaited = row.value("checkpoint_status", Json()) == "pending_validation";
    if (is_awaited && !row.contains(options_.metric)) return;  // the validation may add the metric
    const auto value = watched_.value_in(row);
    if (!value) return;
    counted_ = std::max(counted_, iteration_of(row));
    if (is_better(*value)) {
      best_ = *value;
      waited_ = 0;
      return;
    }
    ++waited_;
    if (should_stop())
      detail::log::info(detail::str("\"", options_.metric, "\" has not been better than ",
                                    best_ ? detail::json_text(Json(*best_)) : "NaN", " for ",
                                    detail::counted(waited_, "report")));
  }
  void on_validated(const Json& fields) override {
    if (fields.contains(options_.metric) && iteration_of(fields) > counted_) on_report(fields);
  }
  bool should_stop() const override { return waited_ > 0 && waited_ >= options_.patience; }
  std::string decides_by() const override { return counted_ > 0 ? "" : options_.metric; }

  std::string name() const override { return options_.metric + (options_.mode == ScoreOrder::max ? " max" : " min"); }
  Json state() const override {
    const bool kept =
        best_ && std::isfinite(*best_);  // JSON cannot hold infinity; a restored run then takes any number as better
    return {{"best", kept ? Json(*best_) : Json()}, {"waited", waited_}, {"counted", counted_}};
  }
  void load_state(const Json& state) override {
    if (state.is_null()) return;
    const auto& best = state.at("best");
    best_ = best.is_null() ? std::nullopt : std::optional(best.get<double>());
    state.at("waited").get_to(waited_);
    counted_ = state.value("counted", std::int64_t{0});
  }

 private:
  static std::int64_t iteration_of(const Json& row) { return row.value("training_iteration", std::int64_t{0}); }
  bool is_better(double value) const {
    if (std::isnan(value)) return false;
    if (!best_) return true;
    const double gain = options_.mode == ScoreOrder::max ? value - *best_ : *best_ - value;
    return gain > options_.min_delta;
  }

  EarlyStoppingOptions options_;
  WatchedMetric watched_;
  std::optional<double> best_ = {};
  int waited_ = 0;            ///< number of compared reports since the best value
  std::int64_t counted_ = 0;  ///< the last report whose value, its own or its validation's, was compared
};

// Gives access to private members of the plateau scheduler: an explicit template instantiation may name private
// members, and its friend functions return pointers to them.
constexpr auto plateau_reset();
constexpr auto plateau_mode();
template <auto reset, auto mode>
struct Reveal {
  friend constexpr auto plateau_reset() { return reset; }
  friend constexpr auto plateau_mode() { return mode; }
};
template struct Reveal<&torch::optim::ReduceLROnPlateauScheduler::reset,
                       &torch::optim::ReduceLROnPlateauScheduler::mode>;

class Plateau final : public Callback {
 public:
  Plateau(torch::optim::ReduceLROnPlateauScheduler& scheduler, const PlateauOptions& options)
      : scheduler_(scheduler), entry_(scheduler), watched_("reducing the learning rate on a plateau", options.metric) {}
  void on_report(const Json& row) override {
    const auto value = watched_.value_in(row);
    if (!value) return;
    set_back_ = [this, reset = must_reset_, scheduler = entry_.object()->keep_schedule()] {
      must_reset_ = reset;
      scheduler();
    };
    if (std::exchange(must_reset_, false)) (scheduler_.*plateau_reset())();
    scheduler_.step(static_cast<float>(*value));
  }

  void on_failed_report(const Json&) override {
    if (const auto set_back = std::exchange(set_back_, {})) set_back();
  }
  void after_report(const std::vector<Json>&, const std::optional<Checkpoint>&) override { set_back_ = {}; }

  std::string name() const override {
    return watched_.metric() + (scheduler_.*plateau_mode() == Scheduler::max ? " max" : " min");
  }
  /// Not null, so that a restored run knows that this callback was there. Its counts are in the scheduler's own state.
  Json state() const override { return Json::object(); }
  /// Without a saved state, the next report resets the scheduler. It cannot be reset here, since State::restore() may
  /// come later.
  void load_state(const Json& state) override { must_reset_ = state.is_null(); }

 private:
  using Scheduler = torch::optim::ReduceLROnPlateauScheduler;
  Scheduler& scheduler_;
  StateEntry entry_;
  WatchedMetric watched_;
  std::function<void()> set_back_ = {};  ///< undoes the scheduler's step, for a report that fails
  bool must_reset_ = false;
};

class LearningRateMonitor final : public Callback {
 public:
  LearningRateMonitor(const torch::optim::Optimizer& optimizer, const LearningRateMonitorOptions& options)
      : optimizer_(optimizer), name_(options.name) {}
  Metrics metrics() override {
    Metrics rates;
    const auto& groups = optimizer_.param_groups();
    for (std::size_t i = 0; i < groups.size(); ++i)
      rates.emplace(groups.size() == 1 ? name_ : detail::str(name_, "_", i), groups[i].options().get_lr());
    return rates;
  }

 private:
  const torch::optim::Optimizer& optimizer_;
  std::string name_;
};

class TimeBudget final : public Callback {
 public:
  explicit TimeBudget(std::chrono::duration<double> time) : time_(time) {}
  void on_start(Session&) override { used_ = {}; }
  void on_report(const Json& row) override { load_state(row.at("time_total_s")); }
  bool should_stop() const override { return used_ >= time_; }
  Json state() const override { return used_.count(); }
  void load_state(const Json& state) override { used_ = std::chrono::duration<double>(state.get<double>()); }

 private:
  std::chrono::duration<double> time_, used_{};
};

}  // namespace

std::shared_ptr<Callback> early_stopping(const EarlyStoppingOptions& options) {
  return std::make_shared<EarlyStopping>(options);
}

std::shared_ptr<Callback> plateau(torch::optim::ReduceLROnPlateauScheduler& scheduler, const PlateauOptions& options) {
  return std::make_shared<Plateau>(scheduler, options);
}

std::shared_ptr<Callback> learning_rate_monitor(const torch::optim::Optimizer& optimizer,
                                                const LearningRateMonitorOptions& options) {
  return std::make_shared<LearningRateMonitor>(optimizer, options);
}

std::shared_ptr<Callback> time_budget(std::chrono::milliseconds time) { return std::make_shared<TimeBudget>(time); }

}  // namespace muster
