#include "muster/schedulers.hpp"

#include "base/text.hpp"
#include "muster/error.hpp"
#include "optim/fields.hpp"

#include <algorithm>
#include <cmath>
#include <concepts>
#include <initializer_list>
#include <numbers>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace muster {
namespace {

/// Calls use(value) with the momentum of each group, or with its first beta; returns false if the groups have neither.
bool visit_momentum(torch::optim::Optimizer& optimizer, auto&& use) {
  bool found = false;
  const auto visit = [&](std::string_view name, auto& value) {
    using Value = std::remove_reference_t<decltype(value)>;
    if constexpr (std::same_as<Value, std::tuple<double, double>>) {
      if (name == "betas") use(std::get<0>(value)), found = true;
    } else if constexpr (std::same_as<Value, double>) {
      if (name == "momentum") use(value), found = true;
    }
  };
  detail::optim::with_optimizer_kind(optimizer, [&]<class K>(const K&) {
    for (auto& group : optimizer.param_groups())
      detail::optim::visit_fields(static_cast<typename K::Options&>(group.options()), visit);
  });
  return found;
}

class Checks {
 public:
  explicit Checks(const char* schedule) : doing_(detail::str("making the schedule ", schedule)) {}

  void require(bool holds, const std::string& fact, std::string_view remedy = "Correct its options") const {
    if (!holds) throw Error(ExitCode::usage, doing_, fact, remedy);
  }
  void require_steps(std::int64_t warmup_steps, double start_factor) const {
    require(warmup_steps >= 0, "warmup_steps is negative");
    require(start_factor >= 0 && start_factor <= 1, "start_factor is not between 0 and 1");
  }

 private:
  std::string doing_;
};

/// Returns the factor of the learning rate at step `step` of a warm-up of `steps` steps that starts at factor `start`.
double warmup_factor(double start, std::int64_t step, std::int64_t steps) {
  return step >= steps ? 1 : start + (1 - start) * static_cast<double>(step) / static_cast<double>(steps);
}

/// Returns a value between `from` (`part` = 0) and `to` (`part` = 1).
double anneal(Anneal strategy, double from, double to, double part) {
  return strategy == Anneal::linear ? from + (to - from) * part
                                    : to + (from - to) / 2 * (1 + std::cos(std::numbers::pi * part));
}

LinearWarmupOptions checked(const LinearWarmupOptions& options) {
  Checks("LinearWarmup").require_steps(options.warmup_steps, options.start_factor);
  return options;
}

CosineWithWarmupOptions checked(const CosineWithWarmupOptions& options, const torch::optim::Optimizer& optimizer) {
  const Checks checks("CosineWithWarmup");
  checks.require_steps(options.warmup_steps, options.start_factor);
  checks.require(options.total_steps > options.warmup_steps,
                 detail::str("total_steps, which includes the warm-up, is ", options.total_steps,
                             ", and warmup_steps is ", options.warmup_steps),
                 "Give the number of all steps of the training");
  checks.require(options.min_lr >= 0, "min_lr is negative");
  for (const auto& group : optimizer.param_groups())
    checks.require(options.min_lr <= group.options().get_lr(), "min_lr is above the optimizer's learning rate");
  return options;
}

OneCycleOptions checked(const OneCycleOptions& options, torch::optim::Optimizer& optimizer) {
  const Checks checks("OneCycle");
  checks.require(options.max_lr >= 0, "max_lr is negative");
  checks.require(options.total_steps > 0, "total_steps is not above 0", "Give the number of all steps of the training");
  checks.require(options.pct_start >= 0 && options.pct_start <= 1, "pct_start is not between 0 and 1");
  checks.require(!options.three_phase || options.pct_start <= 0.5, "three_phase with pct_start above 0.5 has no end");
  checks.require(options.div_factor > 0, "div_factor is not above 0");
  checks.require(options.final_div_factor > 0, "final_div_factor is not above 0");
  const auto is_momentum = [](double value) { return value >= 0 && value < 1; };
  checks.require(is_momentum(options.base_momentum) && is_momentum(options.max_momentum),
                 "base_momentum and max_momentum are not both from 0 to less than 1");
  checks.require(!options.cycle_momentum || visit_momentum(optimizer, [](double) {}), "the optimizer has no momentum",
                 "Let cycle_momentum be false");
  return options;
}

/// The course of a value over one cycle: two or three phases, each from one value to the next.
class Cycle {
 public:
  explicit Cycle(const OneCycleOptions& options) : anneal_(options.anneal_strategy) {
    const auto total = static_cast<double>(options.total_steps), rises = options.pct_start * total;
    last_ = options.total_steps - 1;
    ends_ = {rises - 1};
    if (options.three_phase) ends_.push_back(2 * rises - 2);
    ends_.push_back(total - 1);
  }

  /// `values`: the value at the start of the first phase, then the value at the end of each phase.
  double operator()(std::int64_t at, std::initializer_list<double> values) const {
    const auto step = static_cast<double>(std::min(at, last_));
    const auto* from = values.begin();
    double begin = 0;
    std::size_t phase = 0;
    for (; phase + 1 < ends_.size() && step > ends_[phase]; ++phase, ++from) begin = ends_[phase];
    const double length = ends_[phase] - begin;
    return anneal(anneal_, from[0], from[1], length == 0 ? 1 : (step - begin) / length);
  }

 private:
  Anneal anneal_;
  std::int64_t last_ = 0;
  std::vector<double> ends_;  ///< for each phase, the step at which it ends
};

}  // namespace

Schedule::Schedule(torch::optim::Optimizer& optimizer, Curve lr, Curve momentum)
    : LRScheduler(optimizer),
      optimizer_(&optimizer),
      bases_(get_current_lrs()),
      lr_(std::move(lr)),
      momentum_(std::move(momentum)) {
  const auto first = at(0);
  for (std::size_t g = 0; g < first.size(); ++g) optimizer.param_groups()[g].options().set_lr(first[g]);
}

std::vector<double> Schedule::get_lrs() { return at(std::int64_t{step_count_} + 1); }

std::vector<double> Schedule::at(std::int64_t step) {
  if (momentum_) visit_momentum(*optimizer_, [&](double& momentum) { momentum = momentum_(step, 0); });
  std::vector<double> rates;
  for (const double base : bases_) rates.push_back(lr_(step, base));
  return rates;
}

LinearWarmup::LinearWarmup(torch::optim::Optimizer& optimizer, const LinearWarmupOptions& options)
    : Schedule(optimizer, [options = checked(options)](std::int64_t step, double base) {
        return base * warmup_factor(options.start_factor, step, options.warmup_steps);
      }) {}

CosineWithWarmup::CosineWithWarmup(torch::optim::Optimizer& optimizer, const CosineWithWarmupOptions& options)
    : Schedule(optimizer, [options = checked(options, optimizer)](std::int64_t step, double base) {
        const auto warmup = options.warmup_steps;
        if (step < warmup) return base * warmup_factor(options.start_factor, step, warmup);
        const auto part = static_cast<double>(std::min(step, options.total_steps) - warmup) /
                          static_cast<double>(options.total_steps - warmup);
        return anneal(Anneal::cosine, base, options.min_lr, part);
      }) {}

OneCycle::OneCycle(torch::optim::Optimizer& optimizer, const OneCycleOptions& options)
    : Schedule(
          optimizer,
          [options = checked(options, optimizer), cycle = Cycle(options)](std::int64_t step, double base) {
            const double high = options.max_lr > 0 ? options.max_lr : base, low = high / options.div_factor;
            const double end = low / options.final_div_factor;
            return options.three_phase ? cycle(step, {low, high, low, end}) : cycle(step, {low, high, end});
          },
          !options.cycle_momentum
              ? Curve()
              : [options, cycle = Cycle(options)](std::int64_t step, double) {
                  const double low = options.base_momentum, high = options.max_momentum;
                  return options.three_phase ? cycle(step, {high, low, high, high}) : cycle(step, {high, low, high});
                }) {}

}  // namespace muster
