// Learning-rate schedules that libtorch lacks: cosine with warm-up, one cycle, linear warm-up. They are stepped after
// every optimizer step, and can be used wherever torch's schedulers can.
//
//   auto optimizer = session.prepare_optimizer(torch::optim::AdamW(net->parameters(), 3e-4));
//   muster::CosineWithWarmup scheduler(optimizer, {.warmup_steps = 500, .total_steps = 20'000, .min_lr = 1e-5});
//   auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"scheduler", scheduler}});
//   state.restore();
//   …
//     optimizer.step();
//     scheduler.step();                                             // after each step of the optimizer
//
// With virtual workers a step has several batches: step the scheduler, and torch's schedulers too, after the last one:
// `if (session.is_step_complete()) scheduler.step();`.
//
// Make a scheduler before the state is restored: it scales the learning rates that it finds in the optimizer's groups,
// and sets those of step 0 at once. Each value depends only on the number of steps, so a resumed run continues exactly
// if the State also has the optimizer, which has the learning rate of the next step. After its end a schedule keeps its
// last value.
//
// Invalid options are an Error (ExitCode::usage). torch::optim::ReduceLROnPlateauScheduler can be an entry of a state
// too.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/json.hpp>

#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace muster {

/// The base class of the schedules. Refers to the optimizer, which must outlive it.
class MUSTER_API Schedule : public torch::optim::LRScheduler {
 public:
  /// The current learning rate of each of the optimizer's groups.
  std::vector<double> get_last_lr() const { return get_current_lrs(); }

 protected:
  /// A learning rate or momentum as a function of the number of steps so far and, for a learning rate only, of the
  /// group's own rate `base`.
  using Curve = std::function<double(std::int64_t step, double base)>;
  Schedule(torch::optim::Optimizer& optimizer, Curve lr, Curve momentum = {});

 private:
  std::vector<double> get_lrs() final;
  std::vector<double> at(std::int64_t step);

  torch::optim::Optimizer* optimizer_;
  std::vector<double> bases_;
  Curve lr_, momentum_;
};

struct LinearWarmupOptions {
  std::int64_t warmup_steps = 0;
  /// The initial fraction of the learning rate. With 0 the optimizer's first step changes nothing.
  double start_factor = 0;
};

/// Raises the learning rate linearly from start_factor × the group's own rate to that rate, as torch's LinearLR in
/// Python.
class MUSTER_API LinearWarmup final : public Schedule {
 public:
  LinearWarmup(torch::optim::Optimizer& optimizer, const LinearWarmupOptions& options);
};

struct CosineWithWarmupOptions {
  /// 0: only cosine annealing.
  std::int64_t warmup_steps = 0;
  /// All steps, including the warm-up.
  std::int64_t total_steps = 0;
  /// The final learning rate.
  double min_lr = 0;
  /// See LinearWarmupOptions::start_factor.
  double start_factor = 0;
};

/// A linear warm-up, then half a cosine down to `min_lr` (Loshchilov and Hutter, https://arxiv.org/abs/1608.03983,
/// without restarts).
class MUSTER_API CosineWithWarmup final : public Schedule {
 public:
  CosineWithWarmup(torch::optim::Optimizer& optimizer, const CosineWithWarmupOptions& options);
};

enum class Anneal { cosine, linear };

/// The options of torch's OneCycleLR in Python with its defaults, without epochs, steps_per_epoch and last_epoch.
struct OneCycleOptions {
  /// The largest learning rate, for every group; 0: each group's own.
  double max_lr = 0;
  std::int64_t total_steps = 0;
  /// The fraction of the steps in which the learning rate rises.
  double pct_start = 0.3;
  Anneal anneal_strategy = Anneal::cosine;
  /// Moves the momentum (SGD, RMSprop) or the first beta (Adam, AdamW) in the opposite direction.
  bool cycle_momentum = true;
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  /// The initial learning rate is max_lr / div_factor.
  double div_factor = 25;
  /// The final learning rate is the initial one / final_div_factor.
  double final_div_factor = 1e4;
  /// True: the learning rate falls for as many steps as it rose, then anneals to the final rate. False: it falls during
  /// all remaining steps.
  bool three_phase = false;
};

/// Raises the learning rate to a large value, then lowers it to a very small one (Smith and Topin,
/// https://arxiv.org/abs/1708.07120).
class MUSTER_API OneCycle final : public Schedule {
 public:
  /// Throws an Error (ExitCode::usage) for invalid options, or with cycle_momentum if the optimizer has no momentum.
  OneCycle(torch::optim::Optimizer& optimizer, const OneCycleOptions& options);
};

}  // namespace muster
