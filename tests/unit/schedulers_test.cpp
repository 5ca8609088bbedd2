#include "muster/schedulers.hpp"
#include "muster/error.hpp"
#include "muster/state.hpp"
#include "state/collect.hpp"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace muster::schedulers_test {
namespace {

namespace optim = torch::optim;
const double nan = std::numeric_limits<double>::quiet_NaN();

std::vector<at::Tensor> parameters() { return {at::zeros({2})}; }

double lr_of(const optim::Optimizer& optimizer) { return optimizer.param_groups()[0].options().get_lr(); }

template <class Options>
const Options& options_of(optim::Optimizer& optimizer) {
  return static_cast<const Options&>(optimizer.param_groups()[0].options());
}

/// The learning rates of `steps` steps and one more, the first of which the schedule sets when it is made.
std::vector<double> rates(optim::Optimizer& optimizer, optim::LRScheduler& scheduler, int steps) {
  std::vector<double> all{lr_of(optimizer)};
  for (int step = 0; step < steps; ++step) {
    scheduler.step();
    all.push_back(lr_of(optimizer));
  }
  return all;
}

void expect_near(const std::vector<double>& have, const std::vector<double>& want) {
  ASSERT_EQ(have.size(), want.size());
  for (std::size_t i = 0; i < have.size(); ++i) EXPECT_NEAR(have[i], want[i], 1e-15) << "step " << i;
}

std::string refusal(const std::function<void()>& make) {
  try {
    make();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    return error.what();
  }
  return "no error";
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Schedulers, WarmUpIsAStraightLine) {
  optim::SGD optimizer(parameters(), 0.5);
  LinearWarmup scheduler(optimizer, {.warmup_steps = 4, .start_factor = 0.2});
  expect_near(rates(optimizer, scheduler, 6), {0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5});
  EXPECT_EQ(scheduler.get_last_lr(), std::vector<double>{0.5});
  optim::SGD other(parameters(), 0.5);
  LinearWarmup none(other, {});
  expect_near(rates(other, none, 2), {0.5, 0.5, 0.5});
}

TEST(Schedulers, CosineComesDownAfterItsWarmUp) {
  const double down = 0.1 + 0.2 * (1 + std::sqrt(0.5)), up = 0.1 + 0.2 * (1 - std::sqrt(0.5));
  optim::AdamW optimizer(parameters(), 0.5);
  CosineWithWarmup scheduler(optimizer, {.warmup_steps = 2, .total_steps = 6, .min_lr = 0.1});
  expect_near(rates(optimizer, scheduler, 9), {0, 0.25, 0.5, down, 0.3, up, 0.1, 0.1, 0.1, 0.1});
  optim::AdamW other(parameters(), 0.5);
  CosineWithWarmup plain(other, {.total_steps = 4, .min_lr = 0.1});
  expect_near(rates(other, plain, 5), {0.5, down, 0.3, up, 0.1, 0.1});
}

TEST(Schedulers, EachGroupHasItsOwn) {
  std::vector<optim::OptimizerParamGroup> groups;
  for (const double lr : {0.5, 0.05})
    groups.emplace_back(parameters(), std::make_unique<optim::SGDOptions>(optim::SGDOptions(lr).momentum(0.5)));
  {
    optim::SGD optimizer(groups, optim::SGDOptions(1));
    CosineWithWarmup scheduler(optimizer, {.total_steps = 4});
    for (int i = 0; i < 2; ++i) scheduler.step();
    expect_near(scheduler.get_last_lr(), {0.25, 0.025});
  }
  optim::SGD optimizer(groups, optim::SGDOptions(1));
  OneCycle scheduler(optimizer, {.total_steps = 10, .pct_start = 0.4});
  expect_near(scheduler.get_last_lr(), {0.02, 0.002});
  for (int i = 0; i < 3; ++i) scheduler.step();
  expect_near(scheduler.get_last_lr(), {0.5, 0.05});
  for (auto& group : optimizer.param_groups())
    EXPECT_DOUBLE_EQ(static_cast<optim::SGDOptions&>(group.options()).momentum(), 0.85);
}

/// Step → (learning rate, momentum).
using Table = std::map<int, std::pair<double, double>>;

void expect_cycle(optim::Optimizer& optimizer, const std::function<double()>& momentum, const OneCycleOptions& options,
                  const Table& table) {
  OneCycle scheduler(optimizer, options);
  for (int step = 0; step <= table.rbegin()->first; ++step) {
    if (step > 0) scheduler.step();
    if (!table.contains(step)) continue;
    EXPECT_NEAR(lr_of(optimizer), table.at(step).first, 1e-15) << "step " << step;
    EXPECT_NEAR(momentum(), table.at(step).second, 1e-15) << "step " << step;
  }
}

TEST(Schedulers, OneCycleMovesMomentumAgainstTheRate) {
  const Table table{{0, {0.04, 0.95}},    {1, {0.28, 0.925}}, {2, {0.76, 0.875}}, {3, {1, 0.85}},
                    {6, {0.500002, 0.9}}, {9, {4e-6, 0.95}},  {10, {4e-6, 0.95}}, {20, {4e-6, 0.95}}};
  const OneCycleOptions options{.max_lr = 1, .total_steps = 10, .pct_start = 0.4};
  optim::SGD sgd(parameters(), 0.5);
  expect_cycle(
      sgd, [&] { return options_of<optim::SGDOptions>(sgd).momentum(); }, options, table);
  optim::RMSprop rmsprop(parameters(), 0.5);
  expect_cycle(
      rmsprop, [&] { return options_of<optim::RMSpropOptions>(rmsprop).momentum(); }, options, table);
  optim::Adam adam(parameters(), 0.5);
  expect_cycle(
      adam, [&] { return std::get<0>(options_of<optim::AdamOptions>(adam).betas()); }, options, table);
  EXPECT_EQ(std::get<1>(options_of<optim::AdamOptions>(adam).betas()), 0.999) << "the second stays";
  optim::AdamW adamw(parameters(), 0.5);
  expect_cycle(
      adamw, [&] { return std::get<0>(options_of<optim::AdamWOptions>(adamw).betas()); }, options, table);

  optim::SGD own(parameters(), optim::SGDOptions(1).momentum(0.3));
  expect_cycle(own, [&] { return options_of<optim::SGDOptions>(own).momentum(); },
               {.total_steps = 10, .pct_start = 0.4, .cycle_momentum = false}, {{0, {0.04, 0.3}}, {3, {1, 0.3}}});
}

TEST(Schedulers, OneCycleInThreePhasesOrStraight) {
  const Table straight{{0, {0.04, 0.95}}, {5, {1, 0.85}}, {10, {0.04, 0.95}}, {19, {4e-6, 0.95}}, {30, {4e-6, 0.95}}};
  optim::SGD sgd(parameters(), 0.5);
  expect_cycle(
      sgd, [&] { return options_of<optim::SGDOptions>(sgd).momentum(); },
      {.max_lr = 1, .total_steps = 20, .anneal_strategy = Anneal::linear, .three_phase = true}, straight);
  for (const std::int64_t steps : {1, 2, 3})
    for (const double start : {0.0, 0.3, 0.5, 1.0}) {
      optim::SGD optimizer(parameters(), 0.5);
      OneCycle scheduler(optimizer, {.max_lr = 1, .total_steps = steps, .pct_start = start});
      for (const double rate : rates(optimizer, scheduler, 4)) EXPECT_TRUE(rate >= 0 && rate <= 1) << rate;
    }
}

/// A scheduler and its optimizer, in the middle or at the beginning.
template <class Scheduler, class Options>
struct Scheduled {
  explicit Scheduled(const Options& options) : scheduler(optimizer, options) {}
  at::Tensor weight = at::zeros({2});
  optim::Adam optimizer{std::vector{weight}, optim::AdamOptions(0.3)};
  Scheduler scheduler;
  StateEntries entries() { return {{"weight", weight}, {"optimizer", optimizer}, {"scheduler", scheduler}}; }
};

template <class Scheduler, class Options>
void expect_resumes(const Options& options) {
  Scheduled<Scheduler, Options> straight(options);
  for (int broken = 0; broken < 12; ++broken) {
    Scheduled<Scheduler, Options> before(options), after(options);
    rates(before.optimizer, before.scheduler, broken);
    detail::state::restore(after.entries(), detail::state::collect(before.entries()));
    EXPECT_EQ(lr_of(after.optimizer), lr_of(straight.optimizer)) << broken;
    straight.scheduler.step();
    after.scheduler.step();
    EXPECT_EQ(lr_of(after.optimizer), lr_of(straight.optimizer)) << broken;
    EXPECT_EQ(options_of<optim::AdamOptions>(after.optimizer).betas(),
              options_of<optim::AdamOptions>(straight.optimizer).betas());
  }
}

TEST(Schedulers, GoOnBitForBit) {
  expect_resumes<LinearWarmup>(LinearWarmupOptions{.warmup_steps = 7, .start_factor = 0.1});
  expect_resumes<CosineWithWarmup>(CosineWithWarmupOptions{.warmup_steps = 3, .total_steps = 9, .min_lr = 1e-3});
  expect_resumes<OneCycle>(OneCycleOptions{.max_lr = 0.7, .total_steps = 10});
}

TEST(Schedulers, RefuseWhatCannotBe) {
  optim::SGD sgd(parameters(), 0.5);
  const auto cosine = [&](const CosineWithWarmupOptions& options) {
    return refusal([&] { CosineWithWarmup(sgd, options); });
  };
  EXPECT_SAYS(cosine({}), "total_steps");
  EXPECT_SAYS(cosine({.warmup_steps = 5, .total_steps = 5}), "total_steps");
  EXPECT_SAYS(cosine({.warmup_steps = -1, .total_steps = 5}), "warmup_steps is negative");
  EXPECT_SAYS(cosine({.total_steps = 5, .min_lr = -1}), "min_lr");
  EXPECT_SAYS(cosine({.total_steps = 5, .min_lr = nan}), "min_lr");
  EXPECT_SAYS(cosine({.total_steps = 5, .min_lr = 0.6}), "min_lr is above");
  EXPECT_SAYS(cosine({.total_steps = 5, .start_factor = 1.1}), "start_factor");
  EXPECT_SAYS(refusal([&] { LinearWarmup(sgd, {.warmup_steps = -1}); }), "warmup_steps");
  EXPECT_SAYS(refusal([&] { LinearWarmup(sgd, {.warmup_steps = 1, .start_factor = nan}); }), "start_factor");
  const auto cycle = [&](OneCycleOptions options) {
    if (options.total_steps == 0) options.total_steps = 10;
    return refusal([&] { OneCycle(sgd, options); });
  };
  EXPECT_SAYS(refusal([&] { OneCycle(sgd, {}); }), "total_steps");
  EXPECT_SAYS(cycle({.max_lr = -1}), "max_lr");
  EXPECT_SAYS(cycle({.pct_start = 1.5}), "pct_start");
  EXPECT_SAYS(cycle({.pct_start = 0.6, .three_phase = true}), "three_phase");
  EXPECT_SAYS(cycle({.max_momentum = 1}), "max_momentum");
  EXPECT_SAYS(cycle({.base_momentum = -0.1}), "base_momentum");
  EXPECT_SAYS(cycle({.div_factor = 0}), "div_factor");
  EXPECT_SAYS(cycle({.final_div_factor = -1}), "final_div_factor");
  EXPECT_EQ(lr_of(sgd), 0.5) << "what is refused has changed nothing";
  optim::Adagrad adagrad(parameters(), 0.5);
  optim::LBFGS lbfgs(parameters(), 0.5);
  for (optim::Optimizer* optimizer :
       {static_cast<optim::Optimizer*>(&adagrad), static_cast<optim::Optimizer*>(&lbfgs)}) {
    EXPECT_SAYS(refusal([&] { OneCycle(*optimizer, {.total_steps = 10}); }), "no momentum");
    OneCycle(*optimizer, {.total_steps = 10, .cycle_momentum = false});
    EXPECT_NEAR(lr_of(*optimizer), 0.5 / 25, 1e-15);
  }
}

}  // namespace
}  // namespace muster::schedulers_test
