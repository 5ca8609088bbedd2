// What the reference and the run with muster share: the model of a description, the data that a rank feeds it, and
// changes made to weights and optimizers by hand. Everything is in double precision.
#pragma once

#include "soak/program.hpp"

#include <torch/nn.h>
#include <torch/optim.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace muster::soak {

/// Thrown inside backward().
struct Thrown : std::runtime_error {
  Thrown() : std::runtime_error("thrown by the program") {}
};

/// Uniform in [-1, 1), the same on every machine.
at::Tensor numbers(at::IntArrayRef sizes, std::uint64_t seed);

class NetImpl : public torch::nn::Module {
 public:
  NetImpl(const Model& model, std::uint64_t seed);
  /// Returns the loss, one number. `part.throws_at` counts branches from the end; if there is no such branch, the
  /// exception comes at the first one.
  at::Tensor loss(const Part& part, int model, bool throws);
  /// The parameters that belong to this branch; a tied branch has none.
  std::vector<at::Tensor>& of_branch(int branch) { return branches_.at(static_cast<std::size_t>(branch)); }
  /// Each parameter once, in the order of their names.
  std::vector<at::Tensor> each() const;

 private:
  at::Tensor branch(int index, const at::Tensor& x, const at::Tensor& tokens);

  Model model_;
  at::Tensor in_, out_;
  std::vector<std::vector<at::Tensor>> branches_;
};
TORCH_MODULE(Net);

std::vector<Net> make_nets(const Program& program);
void toggle(Net& net, int branch);
void apply(const Change& change, std::vector<Net>& nets);
void set(torch::optim::Optimizer& optimizer, Program::Optimizer kind, const OptimizerSetting& setting);

/// Calls `use` with the optimizer of this kind over these parameters, and returns its result.
template <class Use>
auto with_optimizer(Program::Optimizer kind, const OptimizerSetting& s, std::vector<at::Tensor> parameters, Use&& use) {
  namespace o = torch::optim;
  switch (kind) {
    case Program::Optimizer::sgd:
      return use(o::SGD(std::move(parameters), o::SGDOptions(s.lr)
                                                   .momentum(s.momentum)
                                                   .dampening(s.dampening)
                                                   .weight_decay(s.weight_decay)
                                                   .nesterov(s.nesterov)));
    case Program::Optimizer::adam:
      return use(o::Adam(std::move(parameters),
                         o::AdamOptions(s.lr).betas({s.beta1, s.beta2}).eps(s.eps).weight_decay(s.weight_decay)));
    default:
      return use(o::AdamW(std::move(parameters),
                          o::AdamWOptions(s.lr).betas({s.beta1, s.beta2}).eps(s.eps).weight_decay(s.weight_decay)));
  }
}

}  // namespace muster::soak
