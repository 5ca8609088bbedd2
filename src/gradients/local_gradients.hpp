// This rank's own gradients, which backward() leaves in .grad for a fused optimizer. Each gets a mark, by which a later
// change by the program is noticed: the optimizer would not average the same gradient as torch's optimizer.
#pragma once

#include "gradients/model_exchanges.hpp"
#include "gradients/model_parameters.hpp"
#include "gradients/tensor_changes.hpp"

#include <cstddef>
#include <optional>
#include <vector>

namespace muster::detail::gradients {

/// An optimizer that averages gradients itself, as part of its step (optim/optimizer_step.cpp).
class FusedOptimizer {
 public:
  /// Called when Reducer::set_fused() replaces this optimizer; not when a newly trained parameter ends the fusion,
  /// after which the optimizer's step fuses it again. Collective.
  virtual void on_unfused() = 0;
  /// Called when a backward() begins although no step has followed the previous backward(), which an exception may have
  /// ended.
  virtual void on_second_round() = 0;

 protected:
  ~FusedOptimizer() = default;
};

class LocalGradients {
 public:
  LocalGradients(const ModelParameters& parameters, const ModelExchanges& exchanges)
      : parameters_(parameters), exchanges_(exchanges), marked_(parameters.size()) {}

  /// The fused optimizer; null if there is none.
  FusedOptimizer* optimizer() const noexcept { return optimizer_; }
  /// Returns the previous one.
  FusedOptimizer* set_optimizer(FusedOptimizer* optimizer) noexcept {
    rounds_ = 0;  // inside join(), ranks may have had different numbers
    return std::exchange(optimizer_, optimizer);
  }
  /// Call it when a round begins. True if it is the first averaging round since end_step().
  bool begin_round(bool averages);
  /// Call it at the end of a step or fetch_averages().
  void end_step() noexcept { rounds_ = 0; }
  /// Number of averaging rounds that have begun since end_step().
  unsigned rounds() const noexcept { return rounds_; }

  /// True if .grad of dense parameters holds this rank's own gradients, for a fused optimizer.
  bool any() const noexcept { return any_; }
  /// Call it when backward() has left this rank's own gradients in .grad. Gradients with a weight are not for the fused
  /// optimizer, but they are marked, too: the mark tells a sum that is zero from a gradient that was discarded.
  void mark_all(bool weighted);
  void mark(std::size_t parameter) { marked_[parameter].mark = mark_of(parameter); }
  void unmark(std::size_t parameter) { marked_[parameter].mark.reset(); }
  /// .grad holds this rank's own gradients no longer.
  void unmark_all();
  /// True if the gradient is as mark() has found it.
  bool is_as_marked(std::size_t parameter) const;
  /// True if the program has not discarded .grad. A gradient whose elements all are zero counts as kept if it has its
  /// mark.
  bool is_kept(std::size_t parameter) const;
  /// True if the exchange was given the gradient as it is now, with the use that the step has of it.
  bool is_as_given(std::size_t parameter, ParameterUse use_in_step) const;

  /// Call it before muster adds to the parameter's .grad or averages it. Records whether the program has changed .grad
  /// since it was marked. A gradient that zero_grad() has removed or set to zero does not count as changed.
  void note_manual_change(std::size_t parameter);
  bool is_altered(std::size_t parameter) const { return marked_[parameter].altered; }
  void forget_manual_changes();
  /// Throws the Error that names the first changed gradient and its rank. Collective.
  [[noreturn]] void throw_changed();

  /// Call it when the fused optimizer has stepped with `scale` times the gradient: .grad is multiplied by it before
  /// anybody reads it.
  void scale_by(std::size_t parameter, double scale);

 private:
  struct Marked {
    std::optional<GradientMark> mark = {};  ///< of .grad, as backward() has left it
    bool altered = false;                   ///< true if .grad was changed by hand after backward()
    /// Factor that .grad has yet to be multiplied by; the fused optimizer has already used it in its step.
    double scale = 1.0;
  };
  GradientMark mark_of(std::size_t parameter) const {
    return GradientMark(parameters_[parameter].tensor.grad(), exchanges_.holds(parameter) ? 1 : 0);
  }

  const ModelParameters& parameters_;
  const ModelExchanges& exchanges_;
  std::vector<Marked> marked_;  ///< [parameters]
  FusedOptimizer* optimizer_ = nullptr;
  bool any_ = false;
  unsigned rounds_ = 0;
};

}  // namespace muster::detail::gradients
