// optim_peer OUT.json
//
// Writes what schedules and averages of weights make of the options of optim.py.
#include "muster/ema.hpp"
#include "muster/schedulers.hpp"

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <fstream>
#include <tuple>
#include <vector>

namespace {

using muster::Json;
namespace optim = torch::optim;

constexpr double lr = 0.3;

/// [learning rate, momentum] of `steps` steps.
template <class Scheduler, class Options, class Optimizer>
Json follow(Optimizer& optimizer, const Options& options, int steps, auto&& momentum) {
  Scheduler scheduler(optimizer, options);
  auto all = Json::array();
  for (int step = 0; step < steps; ++step, scheduler.step())
    all.push_back(Json::array({optimizer.param_groups()[0].options().get_lr(), momentum(optimizer)}));
  return all;
}

template <class Scheduler, class Options>
Json with_sgd(const Options& options, int steps) {
  optim::SGD optimizer({at::zeros({1})}, optim::SGDOptions(lr).momentum(0.5));
  return follow<Scheduler>(optimizer, options, steps, [](optim::SGD& sgd) {
    return static_cast<optim::SGDOptions&>(sgd.param_groups()[0].options()).momentum();
  });
}

template <class Scheduler, class Options>
Json with_adam(const Options& options, int steps) {
  optim::Adam optimizer({at::zeros({1})}, optim::AdamOptions(lr));
  return follow<Scheduler>(optimizer, options, steps, [](optim::Adam& adam) {
    return std::get<0>(static_cast<optim::AdamOptions&>(adam.param_groups()[0].options()).betas());
  });
}

Json averages() {
  const at::NoGradGuard no_grad;
  torch::nn::Linear net(7, 5);
  muster::EMA ema(net, {.decay = 0.93});
  for (int step = 0; step < 50; ++step) {
    net->weight.copy_(at::sin(at::arange(35, at::kFloat) * 0.37 + step).view({5, 7}));
    ema.update();
  }
  const auto scope = ema.apply();
  const auto all = net->weight.contiguous();
  return std::vector<float>(all.const_data_ptr<float>(), all.const_data_ptr<float>() + all.numel());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 64;
  Json all;
  all["linear"] =
      with_sgd<muster::LinearWarmup>(muster::LinearWarmupOptions{.warmup_steps = 17, .start_factor = 1.0 / 3}, 40);
  all["cosine"] =
      with_sgd<muster::CosineWithWarmup>(muster::CosineWithWarmupOptions{.total_steps = 211, .min_lr = 1e-3}, 212);
  all["cosine_with_warmup"] = with_adam<muster::CosineWithWarmup>(
      muster::CosineWithWarmupOptions{.warmup_steps = 23, .total_steps = 211, .min_lr = 1e-3, .start_factor = 0.01},
      212);
  for (const bool linear : {false, true})
    for (const bool three_phase : {false, true})
      for (const int steps : {10, 97, 1000}) {
        const muster::OneCycleOptions options{
            .max_lr = 0.7,
            .total_steps = steps,
            .pct_start = 0.35,
            .anneal_strategy = linear ? muster::Anneal::linear : muster::Anneal::cosine,
            .three_phase = three_phase};
        const auto name =
            "one_cycle " + std::to_string(steps) + (linear ? " linear" : " cos") + (three_phase ? " three_phase" : "");
        all[name + " SGD"] = with_sgd<muster::OneCycle>(options, steps);
        all[name + " Adam"] = with_adam<muster::OneCycle>(options, steps);
      }
  std::ofstream(argv[1]) << Json{{"schedules", std::move(all)}, {"averages", averages()}};
}
