// One of the two sides that play a program: the reference, or muster. Both get the same calls in the same order.
#pragma once

#include "soak/net.hpp"
#include "soak/program.hpp"

#include <vector>

namespace muster::soak {

class Side {
 public:
  explicit Side(const Program& program) : program_(program), nets_(make_nets(program)) {}
  virtual ~Side() = default;

  std::vector<Net>& nets() noexcept { return nets_; }
  virtual void zero_grad(Zero how) {
    if (how == Zero::no) return;
    for (auto& net : nets_) net->zero_grad(how == Zero::to_none);
  }
  virtual void set(const std::vector<OptimizerSetting>& settings) = 0;
  virtual void pass(const Pass& pass) = 0;
  virtual void step(int model) = 0;
  virtual void evaluate() = 0;
  /// True if .grad holds the averages at the end of a pass.
  virtual bool shows_averages(int model) const = 0;

 protected:
  const Program& program_;
  std::vector<Net> nets_;
};

}  // namespace muster::soak
