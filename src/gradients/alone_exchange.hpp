// The exchange of one rank alone: its gradients are the averages, so nothing is copied.
#pragma once

#include "gradients/exchange.hpp"

#include <utility>
#include <vector>

namespace muster::detail::gradients {

class AloneExchange final : public Exchange {
 public:
  /// `parameters`: their number.
  explicit AloneExchange(std::size_t parameters) : uses_(parameters) {}

  void begin(Arrival, Flags flags, double weight) override {
    flags_ = flags;
    weight_ = weight;
  }
  void add(std::size_t index, const at::Tensor&, ParameterUse use) override { uses_[index] = use; }
  void finish() override {}
  int user_count(std::size_t index) const override {
    return uses_[index] == ParameterUse::abandoned ? -1 : static_cast<int>(uses_[index] == ParameterUse::used);
  }
  void fetch(std::size_t, at::Tensor&) override {}
  Flags flags() const override { return flags_; }
  double mean_weight() const override { return weight_; }

 private:
  std::vector<ParameterUse> uses_;
  Flags flags_ = 0;
  double weight_ = 0;
};

}  // namespace muster::detail::gradients
