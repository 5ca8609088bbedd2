// The gradients that wait for an optimizer's step, which a save between two rounds must hold. Prepared optimizers
// report their steps; a step of another optimizer is noticed by the change of parameters.
#pragma once

#include "gradients/model_parameters.hpp"
#include "gradients/rounds.hpp"
#include "gradients/tensor_changes.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::gradients {

class UnsteppedGradients {
 public:
  UnsteppedGradients(const ModelParameters& parameters, const Rounds& rounds)
      : parameters_(parameters), rounds_(rounds), all_(parameters.size()) {}

  /// Records that a gradient was added to .grad; with false, that .grad was removed.
  void note_gradient(std::size_t parameter, bool awaits_step = true) { all_[parameter].awaits_step = awaits_step; }
  /// Records that a prepared optimizer has the parameter. `optimizer` expires when that optimizer is destroyed.
  void note_optimizer(std::size_t parameter, const std::weak_ptr<const void>& optimizer) {
    all_[parameter].optimizer = optimizer;
  }
  /// Records that the parameter's optimizer has stepped it, or has skipped its step.
  void note_step(std::size_t parameter, const std::weak_ptr<const void>& optimizer);
  /// Call it at the end of a round.
  void sample_parameters();
  /// Call it at the start of a round: records whether a new batch adds to gradients that wait for a step. Only the
  /// first round of a batch counts: in a GAN, later rounds of a batch add to gradients that are then discarded.
  /// `gradient_of`: returns the gradient that the round adds to.
  void note_addition(std::int64_t global_step, const std::function<const at::Tensor&(std::size_t)>& gradient_of);
  /// Call it at the start of a round: records whether the gradients that were left at the last to_save() were
  /// discarded.
  void note_discarded();
  /// See Reducer::with_gradient_to_save().
  std::vector<at::Tensor> to_save();

 private:
  struct Gradient {
    std::weak_ptr<const void> optimizer = {};  ///< expires with the prepared optimizer that has the parameter
    /// True if a gradient was added to .grad and the optimizer has not stepped since, as far as is known.
    bool awaits_step = false;
    bool left = false;       ///< true if .grad awaited a step at the last to_save(), and no round has begun since
    bool discarded = false;  ///< true if the program discarded the gradient that was left at that call
  };
  void note_change_of_parameters();

  const ModelParameters& parameters_;
  const Rounds& rounds_;
  std::vector<Gradient> all_;  ///< [parameters]
  /// A few elements of the parameters at the end of the last backward().
  std::optional<ParameterSamples> after_backward_;
  bool any_left_ = false;  ///< true if gradients waited for a step at the last to_save()
  bool adds_up_ = false;   ///< true if a batch has added to gradients that waited for a step
  std::int64_t step_of_last_round_ = -1;
};

}  // namespace muster::detail::gradients
