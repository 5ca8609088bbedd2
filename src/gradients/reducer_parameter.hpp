// What the reducer knows of each parameter. For reducer*.cpp alone.
#pragma once

#include "gradients/reducer.hpp"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <memory>

namespace muster::detail::gradients {

inline constexpr const char* averaging = "averaging gradients";

struct Reducer::Parameter {
  std::string name;
  at::Tensor tensor;
  // As it was when it was prepared.
  std::vector<std::int64_t> sizes;
  at::ScalarType type;
  c10::Device device;

  static constexpr std::size_t none = ~std::size_t{0};
  std::size_t index = none;  ///< in its exchange; none until a pass trains it
  bool sparse = false;       ///< so is its gradient
  bool exchanged() const noexcept { return index != none; }
  bool dense() const noexcept { return exchanged() && !sparse; }

  bool reached = false;  ///< in the pass under way
  bool added = false;    ///< to the exchange, in the last pass that it has begun
  Use use = Use::unused;
  bool fresh = false;          ///< .grad is made by this pass
  const void* hook = nullptr;  ///< that calls after_accumulation()
  bool pending = false;        ///< .grad holds what was added up and not yet averaged
  bool padding = false;        ///< .grad was made by passes of weight 0 alone
  at::Tensor earlier = {};     ///< in .grad before a step of several passes, to which its average is to be added
  /// Inside join(): what earlier passes had averaged into .grad.
  at::Tensor averaged_before = {};
  // For a session that is asked to stop.
  std::weak_ptr<const void> optimizer = {};  ///< lives as long as the prepared one that was the last to step it
  bool waits = false;                        ///< .grad has grown, and no step has been seen since
  bool left = false;                         ///< so it was when stepped() was asked, and no pass has begun since
  bool dropped = false;                      ///< what was left so the last time was thrown away
  // For a fused optimizer.
  std::optional<GradientMark> mark = {};  ///< of .grad as backward() has left it
  bool altered = false;                   ///< .grad was changed by hand since then
  double scale = 1.0;                     ///< that .grad is still to be multiplied by, as the fused optimizer did

  /// An Error if .grad has another layout, type or shape than the parameter had when it was prepared.
  void check_gradient() const;
  bool changed() const {
    return tensor.sizes() != at::IntArrayRef(sizes) || tensor.scalar_type() != type || tensor.device() != device;
  }
};

}  // namespace muster::detail::gradients
