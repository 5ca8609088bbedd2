// Mixed precision: a scope in which torch computes in 16 bits where that is safe, and the scaler that keeps the small
// gradients of half precision from vanishing. bfloat16 has the range of float and needs no scaler.
//
//   auto scaler = session.grad_scaler();                                  // collective
//   for (auto& batch : …) {
//     optimizer.zero_grad();
//     at::Tensor loss;
//     { auto scope = session.autocast({.dtype = at::kHalf}); loss = criterion(net->forward(batch["x"]), batch["y"]); }
//     scaler.scale(loss).backward();                                      // outside of the scope
//     scaler.step(optimizer);                                             // skipped if a gradient is infinite
//     scaler.update();
//   }
#pragma once

#include <muster/communicator.hpp>
#include <muster/detail/export.hpp>
#include <muster/json.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace muster {

class StateEntry;

struct AutocastOptions {
  /// at::kBFloat16 or at::kHalf.
  at::ScalarType dtype = at::kBFloat16;
  /// False: the scope computes in the types of its tensors, even inside of another scope.
  bool enabled = true;
};

/// While it lives, torch's operations on this thread and this type of device cast as torch.autocast does: matrix
/// products and convolutions to `dtype`, operations that need its range to float. Parameters keep their type. Scopes
/// may be nested. backward() belongs outside the scope: it computes in the types of the forward pass. On an x86 CPU
/// without AVX-512, 16 bits take many times as long as float; the first scope that is enabled warns about this.
class MUSTER_API Autocast {
 public:
  /// Begins the scope. An Error (ExitCode::usage) unless the dtype is at::kBFloat16 or at::kHalf.
  explicit Autocast(at::DeviceType device, const AutocastOptions& options = {});
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast();

 private:
  at::DeviceType device_;
  bool was_enabled_;
  at::ScalarType was_dtype_;
};

struct GradScalerOptions {
  double init_scale = 65536;
  /// The scale is multiplied by this after `growth_interval` steps in a row without an infinite gradient; above 1.
  double growth_factor = 2;
  /// The scale is multiplied by this after a step with an infinite gradient; between 0 and 1.
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  /// False: the loss is not scaled, and step() is the optimizer's step.
  bool enabled = true;
};

/// Scales the loss, so that gradients do not vanish in half precision, and skips steps in which a gradient is infinite
/// or NaN. It is torch.amp.GradScaler for several ranks: all of them make the same decisions. Made by
/// Session::grad_scaler(), where a complex parameter that a prepared model trains is an Error (ExitCode::usage).
///
/// Several optimizers may share one scaler: call unscale_() and step() for each of them, and update() after all of
/// them.
class MUSTER_API GradScaler {
 public:
  /// `communicator`: the ranks that step together; nothing else may use it. Throws an Error (ExitCode::usage) if an
  /// option is out of its range.
  GradScaler(Communicator communicator, at::Device device, const GradScalerOptions& options = {});
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// The loss times the scale. Local.
  at::Tensor scale(const at::Tensor& loss) const;
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& losses) const;

  /// Divides the optimizer's gradients by the scale, in place, so that they may be read or clipped before step().
  /// Afterwards .grad has the averages, even if the optimizer is fused (muster/optimizer.hpp). Call it once per
  /// optimizer between two calls of update(), after the optimizer's last backward(). A second call, or one after
  /// step(), is an Error (ExitCode::user_error), and so are gradients in half precision and complex ones. A rank may
  /// lack some or all gradients. Collective.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Unscales the gradients unless unscale_() has done so; then calls optimizer.step(), unless a gradient of any rank
  /// was infinite or NaN. Returns true if it stepped, the same on all ranks. Once per optimizer between two calls of
  /// update(). Collective.
  bool step(torch::optim::Optimizer& optimizer);

  /// Adapts the scale to the gradients since the last call, or sets it to `new_scale`. An Error (ExitCode::user_error)
  /// if `new_scale` is not a finite number above 0 or, without one, if there was no step() or unscale_() since the last
  /// call. If a step has several batches on a worker (ScalingConfig::virtual_workers), the scale changes only after the
  /// last one. Local; the same on all ranks.
  void update(std::optional<double> new_scale = {});

  /// The present scale; 1 if the scaler is not enabled.
  double get_scale() const;
  bool is_enabled() const noexcept { return options_.enabled; }

  /// An entry with the scale, the number of steps since it last changed, and the options: session.state({{"scaler",
  /// scaler}, …}). Refers to this object; empty if the scaler is not enabled.
  operator StateEntry();

 private:
  struct StepStatus {
    bool unscaled = false;
    bool stepped = false;
    bool found_inf = false;        // true if any rank found an infinite or NaN gradient
    bool is_step_complete = true;  // false before the step's last batch
  };
  /// `fetch`: true if gradients that a fused optimizer has not averaged yet must be averaged first.
  void unscale(torch::optim::Optimizer& optimizer, bool fetch);
  /// Unscales on this rank only; returns true if a gradient is infinite or NaN.
  bool unscale_here(const torch::optim::Optimizer& optimizer) const;

  Communicator communicator_;
  GradScalerOptions options_;
  at::Tensor scale_;           // float, on the device, as torch's kernels want it
  at::Tensor growth_tracker_;  // int: steps without an infinite gradient since the scale changed
  std::map<const torch::optim::Optimizer*, StepStatus> statuses_;  // since the last update()
};

}  // namespace muster
