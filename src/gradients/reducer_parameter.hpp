// The reducer's data about each parameter. Included by reducer*.cpp only.
#pragma once

#include "gradients/reducer.hpp"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <memory>

namespace muster::detail::gradients {

inline constexpr const char* averaging = "averaging gradients";

inline constexpr std::int64_t small_elements = 4096;  ///< gradients up to this size are checked for NaN in no time

/// All that the reducer knows of one parameter, a member for each fact.
struct Reducer::Parameter {
  std::string name;
  at::Tensor tensor;
  // As in prepare_model.
  std::vector<std::int64_t> sizes;
  at::ScalarType type;
  c10::Device device;

  static constexpr std::size_t none = ~std::size_t{0};
  std::size_t index = none;  ///< in its exchange; none until a round trains it
  bool sparse = false;       ///< true if its gradient is sparse
  bool exchanged() const noexcept { return index != none; }
  bool dense() const noexcept { return exchanged() && !sparse; }

  bool reached = false;  ///< true if the current round has made its gradient
  bool added = false;    ///< true if the exchange has its gradient for the last round that it has begun
  ParameterUse use = ParameterUse::unused;
  bool fresh = false;          ///< true if the current round makes .grad
  const void* hook = nullptr;  ///< calls after_accumulation()
  bool pending = false;        ///< true if .grad holds accumulated gradients that are not averaged yet
  bool padding = false;        ///< true if only rounds of weight 0 have made .grad
  /// .grad before a step of several rounds, or the averages before a round with a weight; the average is added to it.
  at::Tensor earlier = {};
  /// Inside join(): the averages that earlier rounds have left in .grad.
  at::Tensor averaged_before = {};
  // For saving between two rounds (Reducer::with_gradient_to_save).
  std::weak_ptr<const void> optimizer = {};  ///< expires with the prepared optimizer that has the parameter
  bool awaits_step = false;                  ///< true if a gradient was added to .grad and no step was seen since
  bool left =
      false;  ///< true if .grad awaited a step at the last with_gradient_to_save(), and no round has begun since
  bool discarded = false;  ///< true if the gradient that was left the last time was then discarded
  // For a fused optimizer.
  std::optional<GradientMark> mark = {};  ///< of .grad as backward() has left it
  bool altered = false;                   ///< true if .grad was changed by hand since then
  double scale = 1.0;  ///< factor still to be applied to .grad; the fused optimizer has applied it in its step

  /// Throws an Error if the layout, type or shape of .grad differs from the parameter's in prepare_model.
  void check_gradient() const;
  bool changed() const {
    return tensor.sizes() != at::IntArrayRef(sizes) || tensor.scalar_type() != type || tensor.device() != device;
  }
};

}  // namespace muster::detail::gradients
