// The exchange of one rank alone: its gradients are the averages, so nothing is copied.
#pragma once

#include "gradients/exchange.hpp"

namespace muster::detail::gradients {

class AloneExchange final : public Exchange {
 public:
  /// `parameters`: their number.
  explicit AloneExchange(std::size_t parameters) : Exchange(parameters, 1) {}
  void finish() override {}
  void fetch(std::size_t, at::Tensor&) override {}

 private:
  void begin_round() override {}
  void add_gradient(std::size_t, const at::Tensor&, ParameterUse) override {}
};

}  // namespace muster::detail::gradients
