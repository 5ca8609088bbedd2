#include "soak/reference.hpp"

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/utils/clip_grad.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
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

  void zero_grad(Zero how) override {
    Side::zero_grad(how);
    if (how != Zero::no) sums_.clear();
  }

  /// A pass with an exception is skipped: the zero_grad() that follows discards its gradients.
  void pass(const Pass& pass) override {
    if (pass.throws != Pass::Throws::none) return;
    const auto weight_of = [&](const Part& part) { return pass.given ? part.given : part.weight; };
    double all = 0;
    for (const auto& part : pass.ranks) all += weight_of(part);
    std::vector<at::Tensor> parameters;
    const auto& used = pass.ranks.front().models;
    const std::set<int> models(used.begin(), used.end());
    for (const int m : models)
      for (const auto& p : nets_[static_cast<std::size_t>(m)]->each())
        if (p.requires_grad()) parameters.push_back(p);
    std::vector<at::Tensor> means(parameters.size());
    for (const auto& part : pass.ranks) {
      if (weight_of(part) == 0) continue;
      at::Tensor loss;
      for (const int m : part.models) {
        const auto one = nets_[static_cast<std::size_t>(m)]->loss(part, m, false);
        loss = loss.defined() ? loss + one : one;
      }
      const auto gradients = torch::autograd::grad({loss}, parameters, {}, std::nullopt, false, true);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (!gradients[i].defined()) continue;
        const auto dense = gradients[i].is_sparse() ? gradients[i].to_dense() : gradients[i];
        const auto share = pass.given ? dense * weight_of(part) : dense * (weight_of(part) / all);
        means[i] = means[i].defined() ? means[i] + share : share;
      }
    }
    // Weights that the program gives are summed over all passes up to the one that averages.
    if (pass.given) {
      auto& sums = sums_[models];
      sums.gradients.resize(parameters.size());
      sums.weight += all;
      for (std::size_t i = 0; i < parameters.size(); ++i)
        if (means[i].defined())
          sums.gradients[i] = sums.gradients[i].defined() ? sums.gradients[i] + means[i] : means[i];
      if (!pass.sync) return;
      for (std::size_t i = 0; i < parameters.size(); ++i)
        means[i] = sums.gradients[i].defined() ? sums.gradients[i] / sums.weight : at::Tensor();
      const bool nothing = sums.weight == 0;
      sums = {};
      if (nothing) return step_with_nothing(models);
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
  /// A mean over nothing leaves no zeros with which an optimizer would step.
  void step_with_nothing(const std::set<int>& models) {
    for (const int m : models) {
      auto all = nets_[static_cast<std::size_t>(m)]->each();
      const auto is_nonzero = [](const at::Tensor& p) { return p.grad().defined() && p.grad().any().item<bool>(); };
      if (std::ranges::any_of(all, is_nonzero)) continue;
      for (auto& p : all) p.mutable_grad().reset();
    }
  }

  struct Sums {
    double weight = 0;
    std::vector<at::Tensor> gradients = {};  ///< of the parameters of the models
  };
  std::map<std::set<int>, Sums> sums_;  ///< of passes that wait for their average, by the models of their loss
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
};

}  // namespace

std::unique_ptr<Side> make_reference(const Program& program) { return std::make_unique<Reference>(program); }

}  // namespace muster::soak
