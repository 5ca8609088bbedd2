// Learning-rate schedules that libtorch lacks: cosine with warm-up, one cycle, linear warm-up. Step by step; they are
// torch's schedulers and go where those go.
//
//   auto optimizer = session.prepare_optimizer(torch::optim::AdamW(net->parameters(), 3e-4));
//   muster::CosineWithWarmup scheduler(optimizer, {.warmup_steps = 500, .total_steps = 20'000, .min_lr = 1e-5});
//   auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"scheduler", scheduler}});
//   state.restore();
//   …
//     optimizer.step();
//     scheduler.step();                                             // after each step of the optimizer
//
// With virtual workers, where a step has several batches, it is stepped after the last of them, and so are torch's:
// `if (session.step_complete()) scheduler.step();`.
//
// A scheduler is made before the state is restored: the learning rates that it finds in the optimizer's groups are
// those that it scales, and it sets those of step 0 at once. Each value follows from the number of steps alone, so a
// resumed run goes on exactly, if the optimizer is in the same state: the learning rate of the next step is the
// optimizer's. Past its end a schedule stays at its last value.
//
// Options that cannot be are an Error (ExitCode::usage). torch::optim::ReduceLROnPlateauScheduler is an entry of a
// state like these.
#pragma once

#include <muster/json.hpp>

#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace muster {

/// What the schedules have in common. Refers to the optimizer, which must outlive it.
class Schedule : public torch::optim::LRScheduler {
 public:
  /// The learning rate of each of the optimizer's groups, as it is now.
  std::vector<double> get_last_lr() const { return get_current_lrs(); }

 protected:
  /// A value by the number of steps so far and the group's own learning rate.
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
  /// Where it begins, as a part of the learning rate. With 0 the first step moves nothing.
  double start_factor = 0;
};
void to_json(Json& json, const LinearWarmupOptions& options);
void from_json(const Json& json, LinearWarmupOptions& options);

/// From `start_factor` of the learning rate to all of it in a straight line, as torch's LinearLR in Python.
class LinearWarmup final : public Schedule {
 public:
  LinearWarmup(torch::optim::Optimizer& optimizer, const LinearWarmupOptions& options);
};

struct CosineWithWarmupOptions {
  /// 0: cosine annealing alone.
  std::int64_t warmup_steps = 0;
  /// Those of the warm-up included.
  std::int64_t total_steps = 0;
  /// Where it ends.
  double min_lr = 0;
  /// As of LinearWarmupOptions.
  double start_factor = 0;
};
void to_json(Json& json, const CosineWithWarmupOptions& options);
void from_json(const Json& json, CosineWithWarmupOptions& options);

/// A linear warm-up, then half a cosine down to `min_lr` (Loshchilov and Hutter, https://arxiv.org/abs/1608.03983,
/// without restarts).
class CosineWithWarmup final : public Schedule {
 public:
  CosineWithWarmup(torch::optim::Optimizer& optimizer, const CosineWithWarmupOptions& options);
};

enum class Anneal { cosine, linear };

/// The fields and defaults of torch's OneCycleLR in Python.
struct OneCycleOptions {
  /// The largest learning rate, of every group; 0: each group's own.
  double max_lr = 0;
  std::int64_t total_steps = 0;
  /// The part of the steps in which the learning rate rises.
  double pct_start = 0.3;
  Anneal anneal_strategy = Anneal::cosine;
  /// Moves the momentum (SGD, RMSprop) or the first beta (Adam, AdamW) against the learning rate.
  bool cycle_momentum = true;
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  /// It begins at max_lr / div_factor,
  double div_factor = 25;
  /// and ends at that / final_div_factor.
  double final_div_factor = 1e4;
  /// Down again as long as it went up, and then to the end. Otherwise it takes all the rest for the way down.
  bool three_phase = false;
};
void to_json(Json& json, const OneCycleOptions& options);
void from_json(const Json& json, OneCycleOptions& options);

/// Up to a large learning rate and down to a very small one (Smith and Topin, https://arxiv.org/abs/1708.07120).
class OneCycle final : public Schedule {
 public:
  /// An Error (ExitCode::usage) too where the optimizer has no momentum to move.
  OneCycle(torch::optim::Optimizer& optimizer, const OneCycleOptions& options);
};

}  // namespace muster
