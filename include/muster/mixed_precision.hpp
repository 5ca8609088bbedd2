// Mixed precision: a scope in which torch computes in 16 bits where that is safe, and the scaler without which half's
// small gradients would vanish. bfloat16 has the range of float and needs no scaler.
//
//   auto scaler = session.grad_scaler();                                  // collective
//   for (auto& batch : …) {
//     optimizer.zero_grad();
//     at::Tensor loss;
//     { auto scope = session.autocast({.dtype = at::kHalf}); loss = criterion(net->forward(batch["x"]), batch["y"]); }
//     scaler.scale(loss).backward();                                      // outside of the scope
//     scaler.step(optimizer);                                             // or not, where a gradient is infinite
//     scaler.update();
//   }
#pragma once

#include <muster/communicator.hpp>
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
  /// Without it the scope computes in the types of its tensors, inside of another scope too.
  bool enabled = true;
};
void to_json(Json& json, const AutocastOptions& options);
void from_json(const Json& json, AutocastOptions& options);

/// While it lives, torch's operations on this thread and that kind of device cast as torch.autocast does: matrix
/// products and convolutions to `dtype`, what needs the range to float. Parameters keep their type. Scopes nest, and
/// end in the reverse of their order. backward() belongs outside: it computes in the types of the forward pass. On a
/// CPU without AVX-512, 16 bits take many times as long as float; the first scope warns of it.
class Autocast {
 public:
  /// An Error (ExitCode::usage) for another dtype.
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
  /// What the scale is multiplied by after `growth_interval` steps in a row without an infinite gradient; above 1.
  double growth_factor = 2;
  /// What the scale is multiplied by after a step with one; between 0 and 1.
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  /// Without it the loss is not scaled, and step() is the optimizer's.
  bool enabled = true;
};
void to_json(Json& json, const GradScalerOptions& options);
void from_json(const Json& json, GradScalerOptions& options);

/// Scales the loss, so that gradients do not vanish in half precision, and leaves out the steps in which one of them is
/// infinite or NaN: torch.amp.GradScaler over ranks, which all decide alike. Made by Session::grad_scaler.
///
/// Several optimizers may share one: each has its own unscale_() and step(), and update() comes after all of them.
class GradScaler {
 public:
  /// `communicator`, for this scaler alone: the ranks that step together. Senseless options: Error (ExitCode::usage).
  GradScaler(Communicator communicator, at::Device device, const GradScalerOptions& options = {});
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// The loss times the scale. Local.
  at::Tensor scale(const at::Tensor& loss) const;
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& losses) const;

  /// Divides the optimizer's gradients by the scale, in place, so that they may be clipped or looked at before step().
  /// They are the averages, also where the optimizer is fused (muster/optimizer.hpp).
  /// Once per optimizer between two update(), after its last backward(), else an Error (ExitCode::user_error), as for
  /// gradients in half precision. A rank may lack some gradients, or all of them. Collective.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// unscale_(), unless it was called; then optimizer.step(), unless a gradient of any rank was infinite or NaN.
  /// Whether it stepped, the same on all ranks. Once per optimizer between two update(). Collective.
  bool step(torch::optim::Optimizer& optimizer);

  /// Adapts the scale to what the gradients were since the last call, or sets it. An Error (ExitCode::user_error) if
  /// there was no step() or unscale_(). Before the last batch of a step, where it has several on a worker
  /// (ScalingConfig::virtual_workers), the scale stays. Local, and the same on all ranks.
  void update(std::optional<double> new_scale = {});

  /// 1 where it is not enabled.
  double get_scale() const;
  bool is_enabled() const noexcept { return options_.enabled; }

  /// Scale, steps since it last changed, and options, for session.state({{"scaler", scaler}, …}). Refers to this.
  operator StateEntry();

 private:
  struct Progress {
    bool unscaled = false;
    bool stepped = false;
    bool found_inf = false;  // on any rank
    bool amid_step = false;  // before the step's last batch
  };
  /// `fetch`: gradients that are left to a fused optimizer are averaged first.
  void unscale(torch::optim::Optimizer& optimizer, bool fetch);
  /// Unscales on this rank; whether a gradient is infinite or NaN.
  bool unscale_here(const torch::optim::Optimizer& optimizer) const;

  Communicator communicator_;
  GradScalerOptions options_;
  at::Tensor scale_;           // float, on the device, as torch's kernels want it
  at::Tensor growth_tracker_;  // int: steps without an infinite gradient since the scale changed
  std::map<const torch::optim::Optimizer*, Progress> progress_;  // since the last update()
};

}  // namespace muster
