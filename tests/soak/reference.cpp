#include "soak/reference.hpp"

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/utils/clip_grad.h>

#include <optional>
#include <type_traits>
#include <utility>

namespace muster::soak {
namespace {

class Reference final : public Side {
 public:
  explicit Reference(const Program& program) : Side(program) {
    for (std::size_t m = 0; m < nets_.size(); ++m)
      with_optimizer(program.optimizer, program.settings[m], nets_[m]->each(), [&](auto optimizer) {
        optimizers_.push_back(std::make_unique<std::decay_t<decltype(optimizer)>>(std::move(optimizer)));
      });
  }

  void set(const std::vector<OptimizerSetting>& settings) override {
    for (std::size_t m = 0; m < settings.size(); ++m) soak::set(*optimizers_[m], program_.optimizer, settings[m]);
  }

  /// A pass with an exception is skipped: the zero_grad() that follows discards its gradients.
  void pass(const Pass& pass) override {
    if (pass.throws != Pass::Throws::none) return;
    double all = 0;
    for (const auto& part : pass.ranks) all += part.weight;
    std::vector<at::Tensor> parameters;
    for (const int m : pass.ranks.front().models)
      for (const auto& p : nets_[static_cast<std::size_t>(m)]->each())
        if (p.requires_grad()) parameters.push_back(p);
    std::vector<at::Tensor> means(parameters.size());
    for (const auto& part : pass.ranks) {
      if (part.weight == 0) continue;
      at::Tensor loss;
      for (const int m : part.models) {
        const auto one = nets_[static_cast<std::size_t>(m)]->loss(part, m, false);
        loss = loss.defined() ? loss + one : one;
      }
      const auto gradients = torch::autograd::grad({loss}, parameters, {}, std::nullopt, false, true);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (!gradients[i].defined()) continue;
        const auto dense = gradients[i].is_sparse() ? gradients[i].to_dense() : gradients[i];
        const auto share = dense * (part.weight / all);
        means[i] = means[i].defined() ? means[i] + share : share;
      }
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!means[i].defined()) continue;
      auto& gradient = parameters[i].mutable_grad();
      gradient = gradient.defined() ? gradient + means[i] : means[i];
    }
  }

  void step(int model) override {
    const auto m = static_cast<std::size_t>(model);
    if (program_.max_grad_norm > 0) torch::nn::utils::clip_grad_norm_(nets_[m]->each(), program_.max_grad_norm);
    optimizers_[m]->step();
  }
  void evaluate() override {}
  bool shows_averages(int) const override { return true; }

 private:
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
};

}  // namespace

std::unique_ptr<Side> make_reference(const Program& program) { return std::make_unique<Reference>(program); }

}  // namespace muster::soak
