// What the reducer knows about each parameter. Included by reducer*.cpp only.
#pragma once

#include "gradients/reducer.hpp"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <memory>

namespace muster::detail::gradients {

inline constexpr const char* averaging = "averaging gradients";

/// The most elements of a gradient that is checked for NaN at next to no cost.
inline constexpr std::int64_t small_elements = 4096;

/// All that the reducer knows about one parameter.
struct Reducer::Parameter {
  std::string name;
  at::Tensor tensor;
  // When prepare_model() was called.
  std::vector<std::int64_t> sizes;
  at::ScalarType type;
  c10::Device device;

  static constexpr std::size_t none = ~std::size_t{0};
  std::size_t index = none;  ///< position in its exchange; `none` until a round trains the parameter
  bool sparse = false;       ///< true if its gradient is sparse
  bool exchanged() const noexcept { return index != none; }
  bool dense() const noexcept { return exchanged() && !sparse; }

  bool reached = false;  ///< true if the current round has made its gradient
  bool added = false;    ///< true if add() of the exchange was called for the round that the exchange began last
  ParameterUse use = ParameterUse::unused;
  bool fresh = false;          ///< true if .grad was undefined before the current round's gradient
  const void* hook = nullptr;  ///< address of the hook that calls after_accumulation()
  bool pending = false;        ///< true if .grad holds accumulated gradients that have not been averaged yet
  bool padding = false;        ///< true if all rounds that have added to .grad had weight 0
  /// With virtual workers, .grad as it was before the step; with given weights, the averages of earlier rounds. The new
  /// average is added to it.
  at::Tensor earlier = {};
  /// Inside join(): the averages that earlier rounds had left in .grad.
  at::Tensor averaged_before = {};
  // For saving between two rounds (Reducer::with_gradient_to_save).
  std::weak_ptr<const void> optimizer = {};  ///< expires with the prepared optimizer that has the parameter
  /// True if a gradient was added to .grad and the optimizer has not stepped since, as far as is known.
  bool awaits_step = false;
  bool left =
      false;  ///< true if .grad awaited a step at the last with_gradient_to_save(), and no round has begun since
  bool discarded = false;  ///< true if the program discarded the gradient that was left at that call
  // For a fused optimizer.
  std::optional<GradientMark> mark = {};      ///< of .grad, as backward() has left it
  bool altered = false;                       ///< true if .grad was changed by hand after backward()
  ParameterUse given = ParameterUse::unused;  ///< with the gradient that the exchange averages early
  /// Factor that .grad has yet to be multiplied by; the fused optimizer has already used it in its step.
  double scale = 1.0;

  /// The use of .grad in a fused step: as in torch's optimizers, every parameter with a defined gradient takes part.
  ParameterUse use_in_step() const {
    return tensor.grad().defined() && !padding ? ParameterUse::used : ParameterUse::unused;
  }
  /// Throws an Error if the layout, type or shape of .grad differs from the parameter's in prepare_model.
  void check_gradient() const;
  bool changed() const {
    return tensor.sizes() != at::IntArrayRef(sizes) || tensor.scalar_type() != type || tensor.device() != device;
  }
};

}  // namespace muster::detail::gradients
