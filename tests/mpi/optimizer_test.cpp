// Prepared optimizers, whose step is fused with the averaging, give the same results as torch's own.
#include "gradients/tensor_changes.hpp"
#include "muster/error.hpp"
#include "muster/mixed_precision.hpp"
#include "muster/state.hpp"
#include "optim/optimizer_step.hpp"
#include "state/stateful.hpp"
#include "support/io_errors.hpp"
#include "support/prepared.hpp"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace muster::detail::optim::optimizer_test {
namespace {

using test::expect_close;
using test::expect_same_bits_everywhere;
using test::values;
using test::world;
namespace nn = torch::nn;

/// One large weight and several small parameters; `extra` can be left out.
struct NetImpl : nn::Module {
  nn::Linear in{nullptr}, middle{nullptr}, extra{nullptr}, out{nullptr};
  NetImpl() {
    in = register_module("in", nn::Linear(3, 96));
    middle = register_module("middle", nn::Linear(96, 96));
    extra = register_module("extra", nn::Linear(96, 96));
    out = register_module("out", nn::Linear(96, 2));
    at::NoGradGuard no_grad;
    double seed = 0;
    for (auto& p : parameters()) p.copy_(at::sin(at::arange(p.numel()) * 0.37 + ++seed).view(p.sizes()) * 0.1);
  }
  at::Tensor forward(at::Tensor x, bool use_extra) {
    x = at::tanh(middle(at::tanh(in(x))));
    if (use_extra) x = x + at::tanh(extra(x));
    return out(x);
  }
};
TORCH_MODULE(Net);

/// A model, its optimizer, and how they are used.
template <class O>
struct Training {
  Net net;
  test::Preparation prepare;
  std::shared_ptr<gradients::PreparedModel> prepared = prepare(net.ptr());
  std::unique_ptr<PreparedOptimizer<O>> optimizer;

  template <class Options>
  Training(const Options& options, const OptimizerOptions& how,
           const std::shared_ptr<SnapshotSources>& snapshot_sources = nullptr) {
    O own(net->parameters(), options);
    auto step = make_optimizer_step(own, {prepared}, how, {.snapshot_sources = snapshot_sources});
    optimizer = std::make_unique<PreparedOptimizer<O>>(std::move(own), std::move(step));
  }

  void backward(int step, bool use_extra) {
    net->forward(values({5, 3}, step), use_extra).sub(values({5, 2}, step + 0.5)).square().mean().backward();
  }
  void step(int number, bool use_extra = true) {
    optimizer->zero_grad();
    backward(number, use_extra);
    optimizer->step();
  }
  void expect_same_as(const Training& other, const std::string& what, double tolerance = 2e-5) const {
    const auto here = net->named_parameters(), there = other.net->named_parameters();
    for (std::size_t i = 0; i < here.size(); ++i) {
      const auto difference = (here[i].value() - there[i].value()).abs().max().template item<double>();
      EXPECT_LE(difference, tolerance) << what << ", " << here[i].key();
      expect_same_bits_everywhere(here[i].value(), what + ", " + here[i].key());
    }
  }
};

template <class O>
void average_gradients(O& optimizer) {
  if constexpr (requires { optimizer.average_gradients(); }) optimizer.average_gradients();
}

template <class O, class Options>
void expect_alike(const Options& options, const std::string& what, int steps = 50, OptimizerOptions how = {}) {
  how.fuse = Fuse::always;
  Training<O> fused(options, how);
  how.fuse = Fuse::never;
  Training<O> plain(options, how);
  EXPECT_EQ(fused.optimizer->fused(), world().size() > 1) << what;
  EXPECT_FALSE(plain.optimizer->fused());
  for (int step = 0; step < steps; ++step) {
    // A parameter that no rank uses is unchanged; one that only some ranks use is stepped.
    const bool use_extra = step % 5 != 3 && (step % 5 != 1 || world().rank() == 0);
    fused.step(step, use_extra);
    plain.step(step, use_extra);
    if (how.max_grad_norm > 0) {
      EXPECT_NEAR(fused.optimizer->grad_norm(), plain.optimizer->grad_norm(), 1e-4 * plain.optimizer->grad_norm());
    }
  }
  fused.expect_same_as(plain, what);
}

TEST(PreparedOptimizer, SgdIsTorchs) {
  expect_alike<torch::optim::SGD>(torch::optim::SGDOptions(0.01), "plain");
  expect_alike<torch::optim::SGD>(torch::optim::SGDOptions(0.01).momentum(0.9), "momentum");
  expect_alike<torch::optim::SGD>(torch::optim::SGDOptions(0.01).momentum(0.9).dampening(0.3).weight_decay(0.01),
                                  "dampening, decay");
  expect_alike<torch::optim::SGD>(torch::optim::SGDOptions(0.01).momentum(0.9).nesterov(true).weight_decay(0.01),
                                  "Nesterov");
}

TEST(PreparedOptimizer, AWeightInTwoPlacesIsSteppedOnce) {
  const auto trained = [](bool twice, const OptimizerOptions& options) {
    nn::Linear tied(96, 96);
    {
      const at::NoGradGuard no_grad;
      for (auto& p : tied->parameters()) p.copy_(at::sin(at::arange(p.numel()) * 0.37).view(p.sizes()));
    }
    const auto net = std::make_shared<nn::Module>();
    net->register_module("a", tied.ptr());
    if (twice) net->register_module("b", tied.ptr());
    const test::Preparation prepare;
    const auto prepared = prepare(net);
    torch::optim::SGD own(net->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
    auto step = make_optimizer_step(own, {prepared}, options);
    PreparedOptimizer<torch::optim::SGD> optimizer(std::move(own), std::move(step));
    EXPECT_EQ(optimizer.fused(), options.fuse == Fuse::always && world().size() > 1);
    for (int number = 0; number < 3; ++number) {
      optimizer.zero_grad();
      tied->forward(tied->forward(values({5, 96}, number))).square().mean().backward();
      optimizer.step();
    }
    return tied->weight.detach().clone();
  };
  for (const auto fuse : {Fuse::always, Fuse::never})
    for (const double norm : {0.0, 0.01}) {
      const OptimizerOptions options{.max_grad_norm = norm, .fuse = fuse};
      EXPECT_TRUE(at::allclose(trained(true, options), trained(false, options))) << static_cast<int>(fuse) << norm;
    }
}

TEST(PreparedOptimizer, WeightsInTheSameMemoryStayThere) {
  const auto trained = [](Fuse fuse) {
    nn::Linear a(96, 96), b(96, 96);
    {
      const at::NoGradGuard no_grad;
      for (auto& p : a->parameters()) p.copy_(at::sin(at::arange(p.numel()) * 0.37).view(p.sizes()));
    }
    b->weight.set_data(a->weight);
    b->bias.set_data(a->weight[0]);
    const auto net = std::make_shared<nn::Module>();
    net->register_module("a", a.ptr());
    net->register_module("b", b.ptr());
    const test::Preparation prepare;
    const auto prepared = prepare(net);
    torch::optim::SGD own(net->parameters(), torch::optim::SGDOptions(0.5));
    auto step = make_optimizer_step(own, {prepared}, {.fuse = fuse});
    PreparedOptimizer<torch::optim::SGD> optimizer(std::move(own), std::move(step));
    EXPECT_FALSE(optimizer.fused());
    for (int number = 0; number < 3; ++number) {
      optimizer.zero_grad();
      b->forward(a->forward(values({5, 96}, number))).square().mean().backward();
      optimizer.step();
    }
    EXPECT_EQ(b->weight.const_data_ptr(), a->weight.const_data_ptr());
    EXPECT_TRUE(at::equal(b->bias, a->weight[0]));
    return a->weight.detach().clone();
  };
  EXPECT_TRUE(at::equal(trained(Fuse::always), trained(Fuse::never)));
}

TEST(PreparedOptimizer, AdamIsTorchs) {
  expect_alike<torch::optim::Adam>(torch::optim::AdamOptions(1e-3), "Adam");
  expect_alike<torch::optim::Adam>(torch::optim::AdamOptions(1e-3).weight_decay(0.01).betas({0.8, 0.99}).eps(1e-6),
                                   "decay");
  expect_alike<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3).weight_decay(0.1), "AdamW");
}

template <class O, class Options>
void expect_infinite_ones_stay(const Options& options, const std::string& what) {
  SCOPED_TRACE(what);
  const auto trained = [&](Fuse fuse) {
    // Scores of transitions; forbidden ones are infinite.
    const auto scores = at::sin(at::arange(600) * 0.7).view({20, 30}).clone();
    scores.select(1, 4).fill_(-INFINITY);
    const auto net = std::make_shared<nn::Module>();
    const auto parameter = net->register_parameter("scores", scores);
    const test::Preparation prepare;
    const auto prepared = prepare(net);
    O own(net->parameters(), options);
    auto step = make_optimizer_step(own, {prepared}, {.fuse = fuse});
    PreparedOptimizer<O> optimizer(std::move(own), std::move(step));
    EXPECT_EQ(optimizer.fused(), fuse == Fuse::always && world().size() > 1);
    for (int number = 0; number < 3; ++number) {
      optimizer.zero_grad();
      at::softmax(parameter, 1).sub(values({20, 30}, number)).square().sum().backward();
      optimizer.step();
    }
    EXPECT_TRUE(parameter.select(1, 4).eq(-INFINITY).all().template item<bool>());
    return parameter.detach().clone();
  };
  EXPECT_TRUE(at::allclose(trained(Fuse::always), trained(Fuse::never), 1e-5, 1e-6));
}

TEST(PreparedOptimizer, InfiniteParametersStayInfinite) {
  using torch::optim::SGDOptions;
  expect_infinite_ones_stay<torch::optim::SGD>(SGDOptions(0.1), "plain");
  expect_infinite_ones_stay<torch::optim::SGD>(SGDOptions(0.1).momentum(0.9), "momentum");
  expect_infinite_ones_stay<torch::optim::SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true), "Nesterov");
  expect_infinite_ones_stay<torch::optim::Adam>(torch::optim::AdamOptions(0.01), "Adam");
  expect_infinite_ones_stay<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01).weight_decay(0.1), "AdamW");
}

TEST(PreparedOptimizer, OverAThousandSteps) {
  expect_alike<torch::optim::SGD>(torch::optim::SGDOptions(0.01).momentum(0.9).weight_decay(1e-4), "SGD", 1000);
  expect_alike<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-4), "AdamW", 1000);
}

TEST(PreparedOptimizer, ScalesDownByTheGlobalNorm) {
  expect_alike<torch::optim::SGD>(torch::optim::SGDOptions(0.01).momentum(0.9), "clipped", 30, {.max_grad_norm = 0.05});
  expect_alike<torch::optim::Adam>(torch::optim::AdamOptions(1e-3), "never reached", 10, {.max_grad_norm = 1e6});
}

TEST(PreparedOptimizer, ScalesDownGradientsWhoseNormTheirTypeCannotHold) {
  constexpr std::int64_t width = 64;
  for (const auto& [type, size, fuse] :
       {std::tuple(at::kFloat, 1e30, Fuse::always), std::tuple(at::kFloat, 1e30, Fuse::never),
        std::tuple(at::kHalf, 3e3, Fuse::never)}) {
    nn::Linear net(nn::LinearOptions(width, width).bias(false));
    net->to(type);
    nn::init::zeros_(net->weight);
    const test::Preparation prepare;
    const auto prepared = prepare(net.ptr());
    torch::optim::SGD own(net->parameters(), torch::optim::SGDOptions(1));
    auto step = make_optimizer_step(own, {prepared}, {.max_grad_norm = width, .fuse = fuse});
    PreparedOptimizer<torch::optim::SGD> optimizer(std::move(own), std::move(step));
    net->weight.mul(size).sum().backward();
    optimizer.step();
    EXPECT_EQ(optimizer.fused(), fuse == Fuse::always && world().size() > 1);
    EXPECT_NEAR(optimizer.grad_norm() / (size * width), 1, 1e-6) << type;
    EXPECT_TRUE(at::allclose(net->weight, at::full_like(net->weight, -1), 1e-3)) << type;
  }
}

TEST(PreparedOptimizer, AStepBetweenTwoBackwardOfOneGraphIsTorchsError) {
  for (const auto fuse : {Fuse::always, Fuse::never}) {
    nn::Linear net(3, 3);
    const test::Preparation prepare;
    const auto prepared = prepare(net.ptr());
    torch::optim::SGD own(net->parameters(), torch::optim::SGDOptions(0.1));
    auto step = make_optimizer_step(own, {prepared}, {.fuse = fuse});
    PreparedOptimizer<torch::optim::SGD> optimizer(std::move(own), std::move(step));
    const auto loss = net->forward(net->forward(values({5, 3}, 1))).square().mean();
    loss.backward({}, /*retain_graph=*/true);
    optimizer.step();
    try {
      loss.backward();
      ADD_FAILURE() << "the activations are those of the weights before the step";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("modified by an inplace operation"), std::string::npos) << error.what();
    }
  }
}

TEST(PreparedOptimizer, AnAdversaryStepsBetweenTheGraphs) {
  for (const auto fuse : {Fuse::always, Fuse::never}) {
    nn::Linear generator(3, 3), critic(3, 1);
    const test::Preparation prepare_generator, prepare_critic;
    const auto one = prepare_generator(generator.ptr()), other = prepare_critic(critic.ptr());
    torch::optim::SGD own(generator->parameters(), torch::optim::SGDOptions(0.1)),
        own_critic(critic->parameters(), torch::optim::SGDOptions(0.1));
    auto step = make_optimizer_step(own, {one}, {.fuse = fuse}),
         step_critic = make_optimizer_step(own_critic, {other}, {.fuse = fuse});
    PreparedOptimizer<torch::optim::SGD> of_generator(std::move(own), std::move(step)),
        of_critic(std::move(own_critic), std::move(step_critic));
    const auto before = generator->weight.detach().clone();
    for (int number = 0; number < 3; ++number) {
      const auto fake = generator->forward(values({5, 3}, number));
      of_critic.zero_grad();
      critic->forward(fake.detach()).square().mean().backward();
      of_critic.step();
      of_generator.zero_grad();
      critic->forward(fake).mean().backward();
      of_generator.step();
    }
    EXPECT_FALSE(at::equal(generator->weight, before));
    for (const auto& parameter : generator->parameters()) expect_same_bits_everywhere(parameter, "the generator");
  }
}

TEST(PreparedOptimizer, WhatCannotBeFusedIsStillRight) {
  Training<torch::optim::Adam> training(torch::optim::AdamOptions(1e-3).amsgrad(true), {.fuse = Fuse::always});
  EXPECT_FALSE(training.optimizer->fused());
  Training<torch::optim::RMSprop> other(torch::optim::RMSpropOptions(1e-3), {.fuse = Fuse::always});
  EXPECT_FALSE(other.optimizer->fused());
  for (int step = 0; step < 3; ++step) {
    training.step(step);
    other.step(step);
  }
  for (const auto& p : training.net->named_parameters()) expect_same_bits_everywhere(p.value(), p.key());
  for (const auto& p : other.net->named_parameters()) expect_same_bits_everywhere(p.value(), p.key());
  Training<torch::optim::Adam> small(torch::optim::AdamOptions(1e-3), {});
  EXPECT_FALSE(small.optimizer->fused()) << "it gains nothing";
}

/// Steps like its base class, which muster cannot know.
struct Derived : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    ++steps;
    return SGD::step(std::move(closure));
  }
  int steps = 0;
};

TEST(PreparedOptimizer, OfADerivedClassItsOwnStepIsCalled) {
  Training<Derived> training(torch::optim::SGDOptions(0.1), {.fuse = Fuse::always});
  EXPECT_FALSE(training.optimizer->fused());
  for (int step = 0; step < 3; ++step) training.step(step);
  EXPECT_EQ(training.optimizer->steps, 3);
  for (const auto& p : training.net->named_parameters()) expect_same_bits_everywhere(p.value(), p.key());
}

/// Makes the same change to the parameters of both between steps.
void expect_alike_with(const std::function<void(Net&, int step)>& change, const std::string& what) {
  const auto options = torch::optim::AdamOptions(1e-2);
  Training<torch::optim::Adam> fused(options, {.fuse = Fuse::always}), plain(options, {.fuse = Fuse::never});
  for (int step = 0; step < 20; ++step) {
    const bool use_extra = step % 4 != 2;
    for (auto* training : {&fused, &plain}) {
      training->step(step, use_extra);
      change(training->net, step);
    }
    fused.expect_same_as(plain, what + " after step " + std::to_string(step));
  }
}

TEST(PreparedOptimizer, ChangesBetweenStepsStayRight) {
  const at::NoGradGuard no_grad;
  const auto each = [](const std::function<at::Tensor(at::Tensor&)>& change) {
    return [change](Net& net, int step) {
      const at::NoGradGuard no_grad;
      if (step % 3 == 0)
        for (auto& p : net->parameters()) change(p);
    };
  };
  const at::AutoGradMode grad(true);
  expect_alike_with(each([](at::Tensor& p) { return p.clamp_(-0.05, 0.05); }), "clipped weights");
  expect_alike_with(each([](at::Tensor& p) { return p.mul_(0.9); }), "shrunk weights");
  expect_alike_with(each([](at::Tensor& p) { return p.data().mul_(0.9); }), "shrunk behind autograd's back");
  expect_alike_with(each([](at::Tensor& p) {
                      p.set_data(at::full_like(p, 0.01));
                      return p;
                    }),
                    "other memory");
  expect_alike_with(
      [](Net& net, int step) {
        const at::NoGradGuard no_grad;
        if (step == 7) net->extra->weight.fill_(0.02);  // just before a step that does not use it
        if (step == 9) net->middle->bias.mul_(0.5);
      },
      "single ones");
}

state::ParameterPaths paths_of(const Net& net) {
  state::ParameterPaths paths;
  for (const auto& p : net->named_parameters()) paths.emplace(p.value().unsafeGetTensorImpl(), p.key());
  return paths;
}

/// Trains in both ways, with the same change after each step.
template <class O, class Options>
void expect_alike_changing(const Options& options, const std::function<void(Training<O>&, int step)>& change,
                           const std::string& what) {
  Training<O> fused(options, {.fuse = Fuse::always}), plain(options, {.fuse = Fuse::never});
  for (int step = 0; step < 12; ++step) {
    const bool use_extra = step % 4 != 2;
    for (auto* training : {&fused, &plain}) {
      training->step(step, use_extra);
      change(*training, step);
    }
    fused.expect_same_as(plain, what + " after step " + std::to_string(step));
  }
}

TEST(PreparedOptimizer, WhatIsWrittenThroughPointersIsTakenOver) {
  // Writes as pruning does to some pages of a large weight or of all small parameters, unknown to autograd.
  const auto zero = [](const at::Tensor& p, std::int64_t first, std::int64_t count) {
    std::fill_n(p.data_ptr<float>() + first, count, 0.0f);
  };
  const auto options = torch::optim::AdamOptions(1e-2);
  expect_alike_changing<torch::optim::Adam>(
      options,
      [&](auto& t, int step) {
        if (step == 3) zero(t.net->middle->weight, 17 * 96, 96);
      },
      "a row");
  expect_alike_changing<torch::optim::Adam>(
      options,
      [&](auto& t, int step) {
        if (step % 2 == 1) zero(t.net->in->bias, 5, 1);
      },
      "an element");
  expect_alike_changing<torch::optim::Adam>(
      options,
      [&](auto& t, int step) {
        if (step == 1) zero(t.net->extra->weight, 5000, 96);
      },
      "before it is not used");
  expect_alike_changing<torch::optim::Adam>(
      options,
      [&](auto& t, int step) {
        if (step == 4) zero(t.net->middle->weight, 50 * 96, 96);
        if (step == 5) t.net->middle->weight.data().mul_(0.9);
      },
      "two ways");
}

TEST(PreparedOptimizer, OtherMemoryMayHaveAnotherOrder) {
  expect_alike_changing<torch::optim::SGD>(
      torch::optim::SGDOptions(0.01).momentum(0.9),
      [](auto& t, int step) {
        auto& weight = t.net->middle->weight;
        if (step == 4) weight.set_data(weight.detach().t().contiguous().t());
      },
      "transposed");
}

TEST(AFusedOptimizer, BeginsWithAnotherOrderThanTheModelWasPreparedWith) {
  // For parameters that are exchanged in place, and for small ones, which are copied.
  for (const std::int64_t channels : {4, 64}) {
    SCOPED_TRACE(channels);
    std::vector<at::Tensor> ends;
    for (const auto fuse : {Fuse::always, Fuse::never}) {
      nn::Sequential net(nn::Conv2d(3, 8, 3), nn::Conv2d(8, channels, 3));
      {
        const at::NoGradGuard no_grad;
        for (auto& p : net->parameters()) p.copy_(at::sin(at::arange(p.numel()) * 0.37).view(p.sizes()) * 0.1);
      }
      const test::Preparation prepare;
      const auto prepared = prepare(net.ptr());
      for (auto& p : net->parameters())
        if (p.dim() == 4) p.set_data(p.detach().contiguous(at::MemoryFormat::ChannelsLast));
      torch::optim::SGD own(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      auto step = make_optimizer_step(own, {prepared}, {.fuse = fuse});
      PreparedOptimizer<torch::optim::SGD> optimizer(std::move(own), std::move(step));
      EXPECT_EQ(optimizer.fused(), fuse == Fuse::always && world().size() > 1 && !test::by("hook"));
      for (int number = 0; number < 4; ++number) {
        optimizer.zero_grad();
        net->forward(values({2, 3, 6, 6}, number)).square().mean().backward();
        optimizer.step();
      }
      for (const auto& p : net->parameters()) ends.push_back(p.detach().contiguous().view({-1}));
    }
    const auto count = ends.size() / 2;
    for (std::size_t i = 0; i < count; ++i) expect_close(ends[i], ends[count + i], "parameter " + std::to_string(i));
  }
}

TEST(PreparedOptimizer, AFrozenParameterIsSteppedWithAGradientOfTheProgramsOwn) {
  for (const auto fuse : {Fuse::always, Fuse::never}) {
    Net net;
    for (auto& p : net->extra->parameters()) p.set_requires_grad(false);
    test::Preparation prepare;
    const auto prepared = prepare(net.ptr());
    torch::optim::SGD own(net->parameters(), torch::optim::SGDOptions(0.1));
    auto step = make_optimizer_step(own, {prepared}, {.fuse = fuse});
    PreparedOptimizer<torch::optim::SGD> optimizer(std::move(own), std::move(step));
    const auto want = net->extra->weight.detach() - 0.1;
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      net->forward(values({5, 3}, i), true).square().mean().backward();
      if (i == 1) net->extra->weight.mutable_grad() = at::ones({96, 96});
      optimizer.step();
    }
    expect_close(net->extra->weight, want, fuse == Fuse::always ? "fused" : "plain");
    for (const auto& p : net->named_parameters()) expect_same_bits_everywhere(p.value(), p.key());
  }
}

TEST(PreparedOptimizer, TheStateMayBeChangedBetweenSteps) {
  expect_alike_changing<torch::optim::SGD>(
      torch::optim::SGDOptions(0.01).momentum(0.9),
      [](auto& t, int step) {
        const at::NoGradGuard no_grad;
        t.optimizer->gather_state();
        for (auto& [parameter, state] : t.optimizer->state()) {
          auto& buffer = static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer();
          if (step == 3) buffer.mul_(0.5);
          if (step == 5) buffer.data_ptr<float>()[0] = 1;
          if (step == 7) buffer = buffer.clone();
        }
      },
      "momentum");
  expect_alike_changing<torch::optim::Adam>(
      torch::optim::AdamOptions(1e-3),
      [](auto& t, int step) {
        if (step == 5) t.optimizer->state().clear();
      },
      "begun anew");
}

template <class Options>
Options& options_of(torch::optim::Optimizer& optimizer) {
  return static_cast<Options&>(optimizer.param_groups()[0].options());
}

TEST(PreparedOptimizer, OptionsMayChangeAtAnyTime) {
  const auto sgd = [](auto& t, int step) {
    auto& options = options_of<torch::optim::SGDOptions>(*t.optimizer);
    if (step == 1) options.lr(0.005);
    if (step == 2) options.momentum(0.8);  // after a warm-up
    if (step == 4) options.weight_decay(0.1).dampening(0.5);
    if (step == 6) options.momentum(0);
    if (step == 7) options.momentum(0.6).dampening(0).nesterov(true);
    if (step == 9) options.set_lr(0.001);
  };
  expect_alike_changing<torch::optim::SGD>(torch::optim::SGDOptions(0.01), sgd, "SGD");
  expect_alike_changing<torch::optim::SGD>(torch::optim::SGDOptions(0.01).momentum(0.9), sgd, "SGD with momentum");
  expect_alike_changing<torch::optim::Adam>(
      torch::optim::AdamOptions(1e-3),
      [](auto& t, int step) {
        auto& options = options_of<torch::optim::AdamOptions>(*t.optimizer);
        if (step == 2) options.betas({0.5, 0.9}).eps(1e-3);
        if (step == 4) options.weight_decay(0.1);
        if (step == 6) options.set_lr(0.003);
      },
      "Adam");
  expect_alike_changing<torch::optim::AdamW>(
      torch::optim::AdamWOptions(1e-3),
      [](auto& t, int step) {
        auto& options = options_of<torch::optim::AdamWOptions>(*t.optimizer);
        if (step == 2) options.betas({0.5, 0.9}).eps(1e-3);
        if (step == 4) options.weight_decay(0.3);
        if (step == 8) options.weight_decay(0);
      },
      "AdamW");
}

TEST(PreparedOptimizer, WhatCannotBeFusedAnyLongerGoesOnAlone) {
  // amsgrad from a state that was saved with it; torch itself does not bear it switched on by hand.
  Training<torch::optim::Adam> source(torch::optim::AdamOptions(1e-3).amsgrad(true), {.fuse = Fuse::never});
  for (int step = 0; step < 3; ++step) source.step(step + 70);
  auto saved = StateEntry(*source.optimizer).object()->save(paths_of(source.net));
  for (auto& [path, tensor] : saved.tensors) tensor = tensor.clone();
  expect_alike_changing<torch::optim::Adam>(
      torch::optim::AdamOptions(1e-3),
      [&](auto& t, int step) {
        if (step == 4) StateEntry(*t.optimizer).object()->load(saved, paths_of(t.net));
        if (step == 5) {
          EXPECT_FALSE(t.optimizer->fused());
        }
      },
      "amsgrad from a state");
  // A group of other parameters.
  expect_alike_changing<torch::optim::SGD>(
      torch::optim::SGDOptions(0.01).momentum(0.9),
      [&, extra = std::vector<at::Tensor>()](auto& t, int step) mutable {
        if (step == 4) {
          extra.push_back(at::ones({3}).requires_grad_());
          t.optimizer->add_param_group(torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{extra.back()}));
        }
        if (step > 4) {
          EXPECT_FALSE(t.optimizer->fused());
        }
        if (step == 7) {
          t.optimizer->zero_grad();
          for (auto& p : extra) p.mutable_grad() = at::ones({3});
          t.optimizer->step();
          EXPECT_LT(extra.front()[0].template item<float>(), 1.0f);
        }
      },
      "another parameter");
}

TEST(PreparedOptimizer, FrozenOnesStayAndOthersJoin) {
  const auto options = torch::optim::SGDOptions(0.01).momentum(0.9).weight_decay(0.01);
  for (const auto fuse : {Fuse::always, Fuse::never}) {
    SCOPED_TRACE(fuse == Fuse::always ? "fused" : "plain");
    Training<torch::optim::SGD> training(options, {.fuse = fuse}), want(options, {.fuse = Fuse::never});
    for (int step = 0; step < 8; ++step)
      for (auto* t : {&training, &want}) {
        if (step == 3)
          for (auto& p : t->net->middle->parameters()) p.set_requires_grad(false);
        if (step == 6)
          for (auto& p : t->net->middle->parameters()) p.set_requires_grad(true);
        t->step(step);
      }
    training.expect_same_as(want, "frozen in between");
  }
}

TEST(PreparedOptimizer, AnAverageModelReadsWhatWasStepped) {
  const at::NoGradGuard no_grad;
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  Training<torch::optim::SGD> fused(options, {.fuse = Fuse::always}), plain(options, {.fuse = Fuse::never});
  auto average_of_fused = fused.net->middle->weight.clone(), average_of_plain = plain.net->middle->weight.clone();
  for (int step = 0; step < 10; ++step) {
    const at::AutoGradMode grad(true);
    fused.step(step);
    plain.step(step);
    average_of_fused.lerp_(fused.net->middle->weight.detach(), 0.1);
    average_of_plain.lerp_(plain.net->middle->weight.detach(), 0.1);
  }
  expect_close(average_of_fused, average_of_plain, "average");
}

TEST(PreparedOptimizer, FollowsItsScheduler) {
  const auto options = torch::optim::SGDOptions(0.1);
  Training<torch::optim::SGD> fused(options, {.fuse = Fuse::always}), plain(options, {.fuse = Fuse::never});
  torch::optim::StepLR of_fused(*fused.optimizer, 2, 0.5), of_plain(*plain.optimizer, 2, 0.5);
  for (int step = 0; step < 8; ++step) {
    fused.step(step);
    plain.step(step);
    of_fused.step();
    of_plain.step();
  }
  fused.expect_same_as(plain, "scheduled");
}

TEST(PreparedOptimizer, SeveralPassesAndClosures) {
  const auto options = torch::optim::AdamOptions(1e-3);
  Training<torch::optim::Adam> fused(options, {.fuse = Fuse::always}), plain(options, {.fuse = Fuse::never});
  for (int step = 0; step < 6; ++step)
    for (auto* training : {&fused, &plain}) {
      training->optimizer->zero_grad();
      if (step % 3 == 0) {
        const NoSync scope(training->prepare.no_sync_depth);
        training->backward(step, true);
      }
      training->backward(step + 1, true);
      if (step % 3 == 1) training->backward(step + 2, false);  // averaged twice
      if (step % 3 != 2) {
        training->optimizer->step();
        continue;
      }
      const auto loss = training->optimizer->step([&] {
        training->optimizer->zero_grad();
        training->backward(step, true);
        return at::full({}, 3.0f);
      });
      EXPECT_EQ(loss.template item<float>(), 3.0f);
    }
  fused.expect_same_as(plain, "several passes");
}

TEST(PreparedOptimizer, GradientsMayBeChangedBeforeTheStep) {
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  Training<torch::optim::SGD> fused(options, {.fuse = Fuse::always}), plain(options, {.fuse = Fuse::never});
  for (int step = 0; step < 4; ++step)
    for (auto* training : {&fused, &plain}) {
      training->optimizer->zero_grad();
      training->backward(step, true);
      average_gradients(*training->optimizer);
      for (auto& p : training->net->parameters()) p.mutable_grad().mul_(0.25);
      training->optimizer->step();
    }
  fused.expect_same_as(plain, "quarters");
}

TEST(PreparedOptimizer, UnfrozenParametersJoin) {
  for (const auto fuse : {Fuse::always, Fuse::never}) {
    Net net;
    for (auto& p : net->extra->parameters()) p.set_requires_grad(false);
    test::Preparation prepare;
    const auto prepared = prepare(net.ptr());
    torch::optim::SGD own(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    auto step = make_optimizer_step(own, {prepared}, {.fuse = fuse});
    PreparedOptimizer<torch::optim::SGD> optimizer(std::move(own), std::move(step));
    const auto before = net->extra->weight.clone();
    for (int i = 0; i < 6; ++i) {
      if (i == 3)
        for (auto& p : net->extra->parameters()) p.set_requires_grad(true);
      optimizer.zero_grad();
      net->forward(values({5, 3}, i), true).square().mean().backward();
      optimizer.step();
      EXPECT_EQ(at::equal(net->extra->weight, before), i < 3);
    }
    for (const auto& p : net->named_parameters()) expect_same_bits_everywhere(p.value(), p.key());
  }
}

TEST(PreparedOptimizer, StatesGoFromOneToTheOther) {
  const auto options = torch::optim::AdamOptions(1e-3);
  for (const auto to : {Fuse::always, Fuse::never}) {
    const auto from = to == Fuse::always ? Fuse::never : Fuse::always;
    Training<torch::optim::Adam> first(options, {.fuse = from}), second(options, {.fuse = to});
    for (int step = 0; step < 5; ++step) first.step(step, step % 2 == 0);
    for (int step = 0; step < 2; ++step) second.step(step + 70);  // what is there is replaced
    first.optimizer->gather_state();
    auto saved = StateEntry(*first.optimizer).object()->save(paths_of(first.net));
    for (auto& [path, tensor] : saved.tensors) tensor = tensor.clone();
    {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < first.net->parameters().size(); ++i)
        second.net->parameters()[i].copy_(first.net->parameters()[i]);
    }
    StateEntry(*second.optimizer).object()->load(saved, paths_of(second.net));
    for (int step = 5; step < 10; ++step) {
      first.step(step);
      second.step(step);
    }
    second.expect_same_as(first, "continued");
  }
}

TEST(PreparedOptimizer, ParametersOutliveIt) {
  auto training = std::make_unique<Training<torch::optim::Adam>>(torch::optim::AdamOptions(1e-3),
                                                                 OptimizerOptions{.fuse = Fuse::always});
  for (int step = 0; step < 3; ++step) training->step(step);
  Net net = training->net;
  const auto want = net->middle->weight.clone();
  training.reset();
  EXPECT_TRUE(at::equal(net->middle->weight, want));
  net->forward(values({5, 3}, 1), true).sum().backward();
  EXPECT_TRUE(net->middle->weight.grad().defined());
}

TEST(PreparedOptimizer, DoublePrecisionAndGroups) {
  std::vector<Net> nets;
  for (const auto fuse : {Fuse::always, Fuse::never}) {
    Net net;
    net->to(at::kDouble);
    test::Preparation prepare;
    const auto prepared = prepare(net.ptr());
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(net->middle->parameters(), std::make_unique<torch::optim::SGDOptions>(0.2));
    std::vector<at::Tensor> rest;
    for (auto& part : {net->in, net->extra, net->out})
      for (auto& p : part->parameters()) rest.push_back(p);
    groups.emplace_back(rest, std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.01).momentum(0.9)));
    torch::optim::SGD own(groups, torch::optim::SGDOptions(0.1));
    auto step = make_optimizer_step(own, {prepared}, {.fuse = fuse});
    PreparedOptimizer<torch::optim::SGD> optimizer(std::move(own), std::move(step));
    for (int i = 0; i < 10; ++i) {
      optimizer.zero_grad();
      net->forward(values({5, 3}, i).to(at::kDouble), true).square().mean().backward();
      optimizer.step();
    }
    nets.push_back(net);
  }
  for (std::size_t i = 0; i < nets[0]->parameters().size(); ++i)
    EXPECT_TRUE(at::allclose(nets[0]->parameters()[i], nets[1]->parameters()[i], 1e-12, 1e-13)) << i;
}

/// A model in double precision, and what prepares optimizers for it.
struct Model {
  Net net;
  test::Preparation prepare;
  std::shared_ptr<gradients::PreparedModel> prepared;
  Fuse fuse;

  explicit Model(Fuse how, const std::function<void(Net&)>& before = {}) : fuse(how) {
    net->to(at::kDouble);
    if (before) before(net);
    prepared = prepare(net.ptr());
  }
  template <class O>
  std::unique_ptr<PreparedOptimizer<O>> optimizer(O own, OptimizerOptions how = {}) const {
    how.fuse = fuse;
    auto step = make_optimizer_step(own, {prepared}, how);
    return std::make_unique<PreparedOptimizer<O>>(std::move(own), std::move(step));
  }
  auto sgd(const std::vector<at::Tensor>& parameters, double lr, OptimizerOptions how = {}) const {
    return optimizer(torch::optim::SGD(parameters, torch::optim::SGDOptions(lr).momentum(0.9)), how);
  }
  auto sgd(double lr, OptimizerOptions how = {}) const { return sgd(net->parameters(), lr, how); }
  auto plain(const std::vector<at::Tensor>& parameters, double lr) const {
    return torch::optim::SGD(parameters, torch::optim::SGDOptions(lr));
  }
  std::vector<at::Tensor> head() const { return net->out->parameters(); }
  at::Tensor loss(int step) {
    return net->forward(values({5, 3}, step).to(at::kDouble), true)
        .sub(values({5, 2}, step + 0.5).to(at::kDouble))
        .square()
        .mean();
  }
  void backward(int step) { loss(step).backward(); }
  bool fuses() const { return fuse == Fuse::always && world().size() > 1; }
};

using Program = std::function<void(Model&)>;

/// The program ends with the same weights, on all ranks, whether optimizers are fused or not.
void expect_alike_fused(const std::string& what, const Program& program, const std::function<void(Net&)>& before = {}) {
  SCOPED_TRACE(what);
  Model fused(Fuse::always, before), plain(Fuse::never, before);
  program(fused);
  program(plain);
  const auto have = fused.net->named_parameters(), want = plain.net->named_parameters();
  for (std::size_t i = 0; i < have.size(); ++i) {
    EXPECT_TRUE(at::allclose(have[i].value(), want[i].value(), 1e-12, 1e-13))
        << have[i].key() << " is " << (have[i].value() - want[i].value()).abs().max().item<double>() << " away";
    expect_same_bits_everywhere(have[i].value(), have[i].key());
  }
}

/// Fused, the program ends by the same Error on all ranks, with that in its text, and nothing is written by it.
void expect_error_fused(const std::string& what, const std::string& text, const Program& program) {
  SCOPED_TRACE(what);
  {
    Model plain(Fuse::never);
    EXPECT_NO_THROW(program(plain));
  }
  if (world().size() == 1) return;
  Model fused(Fuse::always);
  std::string said;
  try {
    program(fused);
  } catch (const Error& error) {
    said = error.what();
  }
  for (const auto& other : world().all_gather(said)) EXPECT_EQ(other, said);
  EXPECT_NE(said.find(text), std::string::npos) << "it says: " << said;
}

TEST(PreparedOptimizer, RefusesANormThatIsNoNumber) {
  for (const double norm : {std::nan(""), -1.0}) {
    Model m(Fuse::never);
    try {
      m.sgd(0.05, {.max_grad_norm = norm});
      ADD_FAILURE() << norm;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_NE(std::string(error.what()).find("max_grad_norm is negative or not a number. Give a norm"),
                std::string::npos)
          << error.what();
    }
  }
  Model m(Fuse::never);
  auto measures = m.sgd(0.05, {.max_grad_norm = INFINITY});
  m.backward(1);
  measures->step();
  EXPECT_GT(measures->grad_norm(), 0) << "nothing is scaled, and the norm is known";
}

TEST(PreparedOptimizer, StepsOnAfterAnExceptionOnOneRankWhoseParametersWereWrittenBefore) {
  Model m(Fuse::always), want(Fuse::never);
  auto optimizer = m.sgd(0.05), plain = want.sgd(0.05);
  for (int step = 0; step < 4; ++step) {
    optimizer->zero_grad();
    plain->zero_grad();
    m.backward(step);
    want.backward(step);
    if (step == 2) {
      // The next pass is cut off on one rank; then all forget it.
      optimizer->zero_grad();
      if (world().rank() == 0) {
        const auto& weight = m.net->in->weight;
        const auto hook = weight.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("one rank"); });
        EXPECT_THROW(m.backward(9), std::runtime_error);
        weight.remove_hook(hook);
      } else {
        EXPECT_THROW((m.backward(9), optimizer->step()), Error);
      }
      optimizer->zero_grad();
      m.backward(step);
    }
    optimizer->step();
    plain->step();
    const at::NoGradGuard no_grad;
    for (auto* const model : {&m, &want})
      for (auto& p : model->net->parameters()) p.mul_(0.9);
  }
  const auto have = m.net->named_parameters(), other = want.net->named_parameters();
  for (std::size_t i = 0; i < have.size(); ++i)
    EXPECT_TRUE(at::allclose(have[i].value(), other[i].value(), 1e-12, 1e-13)) << have[i].key();
}

TEST(PreparedOptimizer, AveragesWhatPassesInNoSyncHaveLeft) {
  enum class By { step, average, head };
  for (const auto fuse : {Fuse::always, Fuse::never})
    for (const auto by : {By::step, By::average, By::head})
      for (const bool after_an_average : {false, true}) {
        SCOPED_TRACE(std::to_string(static_cast<int>(fuse)) + std::to_string(static_cast<int>(by)) +
                     std::to_string(after_an_average));
        Model m(fuse), want(Fuse::never);
        const auto whole = m.sgd(0.05), head = m.sgd(m.head(), 0.1);
        auto plain = want.sgd(0.05), plain_head = want.sgd(want.head(), 0.1);
        for (int step = 0; step < 3; ++step) {
          whole->zero_grad();
          plain->zero_grad();
          if (after_an_average) m.backward(step + 20), want.backward(step + 20);
          for (const int pass : {1, 2}) {
            const NoSync scope(m.prepare.no_sync_depth);
            // A batch without samples counts for nothing, but is a pass.
            const bool ghost = pass == 2 && world().rank() == 0 && world().size() > 1;
            for (auto* const model : {&m, &want}) {
              model->prepare.weight->local = ghost ? 0 : 2;
              model->prepare.weight->global = 2 * (world().size() - (pass == 2 && world().size() > 1));
              model->backward(step * 10 + pass);
              *model->prepare.weight = {.total = world().size()};
            }
          }
          if (by == By::average) average_gradients(*whole);
          if (by == By::head) head->step(), plain_head->step();
          whole->step();
          plain->step();
        }
        const auto have = m.net->named_parameters(), other = want.net->named_parameters();
        for (std::size_t i = 0; i < have.size(); ++i) {
          EXPECT_TRUE(at::allclose(have[i].value(), other[i].value(), 1e-11, 1e-12)) << have[i].key();
          expect_same_bits_everywhere(have[i].value(), have[i].key());
        }
      }
}

TEST(PreparedOptimizer, WithWeightsOfTheProgramIsTheSameFusedOrNot) {
  expect_alike_fused("weights", [](Model& m) {
    const auto whole = m.sgd(0.05, {.max_grad_norm = 0.5});
    const auto backward = [&](int number, std::optional<double> weight) {
      m.prepare.weight->given = weight;
      m.backward(number);
    };
    const double mine = 100.0 + 37 * world().rank();
    backward(1, {});
    whole->step();  // without a weight
    whole->zero_grad();
    for (int step = 2; step < 5; ++step) {
      {
        const NoSync scope(m.prepare.no_sync_depth);
        backward(10 * step, mine * step);
      }
      if (step < 4) backward(10 * step + 1, 3 + world().rank());
      if (step == 3) backward(10 * step + 2, 1 / mine);  // a second average
      if (step == 3) backward(10 * step + 3, {});
      whole->step();
      if (step == 3) whole->zero_grad(false);
    }
    whole->zero_grad();
    const auto before = m.net->out->weight.detach().clone();
    backward(50, 0);
    whole->step();
    EXPECT_TRUE(at::equal(before, m.net->out->weight)) << "no step";
    backward(51, mine);
    whole->step();
    EXPECT_FALSE(at::equal(before, m.net->out->weight));
  });
  Model m(Fuse::always);
  const auto whole = m.sgd(0.05);
  m.backward(1);
  m.prepare.weight->given = 1;
  if (m.fuses()) {
    EXPECT_THROW(m.backward(2), Error) << "the first gradients have yet to be averaged";
  } else {
    EXPECT_NO_THROW(m.backward(2));
  }
}

/// Each rank calls its part of the program, and gets an Error with the text.
void expect_error_everywhere(const std::string& text, const Program& program, Fuse fuse) {
  Model m(fuse);
  std::string said;
  try {
    program(m);
  } catch (const Error& error) {
    said = error.what();
  }
  for (const auto& of_rank : world().all_gather(said))
    EXPECT_NE(of_rank.find(text), std::string::npos) << "it says: " << of_rank;
}

TEST(PreparedOptimizer, RefusesWeightsOnSomeRanksOnly) {
  if (world().size() == 1) return;
  for (const auto fuse : {Fuse::always, Fuse::never})
    for (const double max_norm : {0.0, 0.5})
      for (const int with_weight : {0, 1})
        for (const bool second : {false, true}) {
          SCOPED_TRACE(std::to_string(max_norm) + std::to_string(with_weight) + std::to_string(second));
          const auto program = [&](Model& m) {
            const auto whole = m.sgd(0.05, {.max_grad_norm = max_norm});
            if (second) {
              m.backward(1);
              whole->step();
              whole->zero_grad();
            }
            if (world().rank() == with_weight) m.prepare.weight->given = 3;
            m.backward(2);
            whole->step();
          };
          expect_error_everywhere("a weight for some batches of a step only", program, fuse);
        }
}

/// Ranks with a weight average in backward(). The others leave their gradients to step(), and may wait before it.
TEST(AFusedOptimizer, RefusesWeightsOnSomeRanksOnlyWhateverComesBeforeTheStep) {
  if (world().size() == 1) return;
  const std::vector<Program> programs{
      [](Model& m) {
        const auto whole = m.sgd(0.05);
        m.backward(1);
        world().barrier();
        whole->step();
      },
      [](Model& m) {
        const auto whole = m.sgd(0.05);
        nn::Linear second(2, 2);
        const auto prepared = m.prepare(second.ptr());
        (m.loss(1) + second->forward(values({3, 2}, 1)).square().mean()).backward();
        whole->step();
      },
      [](Model& m) {
        nn::Sequential net(nn::Embedding(nn::EmbeddingOptions(20, 96).sparse(true)), nn::Linear(96, 96));
        const auto prepared = m.prepare(net.ptr());
        torch::optim::SGD own(net->ptr(1)->parameters(), 0.05);
        auto step = make_optimizer_step(own, {prepared}, {.fuse = Fuse::always});
        PreparedOptimizer<torch::optim::SGD> optimizer(std::move(own), std::move(step));
        const auto loss = [&] { return net->forward(at::arange(4) + world().rank()).square().mean(); };
        const auto given = std::exchange(m.prepare.weight->given, std::nullopt);
        loss().backward();  // the second one adds to gradients that are left
        m.prepare.weight->given = given;
        if (given) net->zero_grad();
        loss().backward();
        optimizer.step();
      }};
  for (std::size_t i = 0; i < programs.size(); ++i)
    for (const int with_weight : {0, 1}) {
      SCOPED_TRACE(std::to_string(i) + std::to_string(with_weight));
      const auto program = [&](Model& m) {
        if (world().rank() == with_weight) m.prepare.weight->given = 3;
        programs[i](m);
      };
      expect_error_everywhere("a weight for some batches of a step only", program, Fuse::always);
    }
}

TEST(AFusedOptimizer, RefusesToStepIfARankHasMissedABackward) {
  if (world().size() == 1) return;
  for (const double max_norm : {0.0, 0.5})
    for (const int passes : {1, 2}) {
      SCOPED_TRACE(std::to_string(max_norm) + std::to_string(passes));
      const auto program = [&](Model& m) {
        const auto whole = m.sgd(0.05, {.max_grad_norm = max_norm});
        m.backward(0);
        whole->step();
        whole->zero_grad();
        for (int pass = 1; pass < passes; ++pass) m.backward(pass);
        if (world().rank() == 0) {
          const auto loss = m.loss(9);
          loss.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("before any gradient"); });
          EXPECT_THROW(loss.backward(), std::runtime_error);
        } else {
          m.backward(9);
        }
        whole->step();
      };
      expect_error_everywhere("the same number of backward() since the last step", program, Fuse::always);
    }
}

TEST(AFusedOptimizer, StepsWithoutTheOthersOnceItsModelIsGone) {
  for (const bool gathers : {false, true}) {
    Training<torch::optim::Adam> training(torch::optim::AdamOptions(1e-3), {.fuse = Fuse::always});
    training.step(1);
    if (gathers) training.optimizer->gather_state();
    training.prepared.reset();
    if (world().rank() == 0) {
      const auto before = training.net->middle->weight.clone();
      training.optimizer->zero_grad();
      training.backward(2, true);
      if (gathers || test::averaging_ranks().topology().num_nodes == 1) {
        EXPECT_NO_THROW(training.optimizer->step());
        EXPECT_FALSE(at::equal(training.net->middle->weight, before));
      } else {
        try {
          training.optimizer->step();
          ADD_FAILURE() << "it has stepped with a part of its state";
        } catch (const Error& error) {
          EXPECT_NE(std::string(error.what()).find("the other nodes have parts of its state"), std::string::npos)
              << error.what();
        }
        EXPECT_TRUE(at::equal(training.net->middle->weight, before));
      }
    }
    world().barrier();
  }
}

TEST(AFusedOptimizer, RefusesToStepWhileAnotherRankOnlyAverages) {
  if (world().size() == 1) return;
  for (const double max_norm : {0.0, 0.5})
    expect_error_everywhere(
        "while others average without it",
        [&](Model& m) {
          const auto whole = m.sgd(0.05, {.max_grad_norm = max_norm});
          m.backward(1);
          if (world().rank() == 0) return whole->average_gradients();
          whole->step();
        },
        Fuse::always);
}

/// A rank whose gradients were given to the exchange later than those of others.
TEST(AFusedOptimizer, StepsOnAfterExceptionsInSeveralRounds) {
  expect_alike_fused("after exceptions", [](Model& m) {
    const auto whole = m.sgd(0.05);
    for (const int culprit : {0, world().size() - 1}) {
      m.backward(1);
      whole->step();
      whole->zero_grad();
      const auto throws = [](at::Tensor) -> at::Tensor { throw std::runtime_error("one rank"); };
      if (world().rank() == culprit) {
        const auto& weight = m.net->middle->weight;
        const auto hook = weight.register_hook(throws);
        EXPECT_THROW(m.backward(2), std::runtime_error);
        weight.remove_hook(hook);
      } else {
        EXPECT_THROW((m.backward(2), whole->step()), Error);
      }
      whole->zero_grad();
      // Those that have found the exception give these gradients early, and then change them.
      m.backward(3);
      m.backward(4);
      whole->step();
      whole->zero_grad();
    }
  });
}

TEST(AFusedOptimizer, StepsOnAfterAnExceptionBesideSparseGradients) {
  if (world().size() == 1) return;
  nn::Sequential net(nn::Embedding(nn::EmbeddingOptions(20, 96).sparse(true)), nn::Linear(96, 96));
  const test::Preparation prepare;
  const auto prepared = prepare(net.ptr());
  torch::optim::SGD own(net->ptr(1)->parameters(), 0.05);
  auto step = make_optimizer_step(own, {prepared}, {.fuse = Fuse::always});
  PreparedOptimizer<torch::optim::SGD> optimizer(std::move(own), std::move(step));
  EXPECT_TRUE(optimizer.fused());
  const auto backward = [&] {
    net->forward(at::arange(4) + world().rank()).square().mean().backward();
    optimizer.step();
    net->zero_grad();
  };
  for (int round = 0; round < 3; ++round) {
    backward();
    const auto weight = net->ptr(1)->parameters()[0];
    if (world().rank() == round % world().size()) {
      const auto hook = weight.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("one rank"); });
      EXPECT_THROW(backward(), std::runtime_error);
      weight.remove_hook(hook);
    } else {
      EXPECT_THROW(backward(), Error);
    }
    net->zero_grad();
  }
  backward();
  for (const auto& p : net->named_parameters()) expect_same_bits_everywhere(p.value(), p.key());
}

TEST(PreparedOptimizer, AveragesNothingThatWasThrownAwayAfterNoSync) {
  for (const bool to_none : {true, false})
    expect_alike_fused("thrown away", [&](Model& m) {
      const auto whole = m.sgd(0.05);
      m.backward(1);
      whole->step();
      {
        const NoSync scope(m.prepare.no_sync_depth);
        m.backward(2);
      }
      whole->zero_grad(to_none);
      whole->step();
      for (const auto& p : m.net->parameters()) EXPECT_FALSE(p.grad().defined() && p.grad().any().item<bool>());
    });
}

TEST(PreparedOptimizer, AveragesWhatAnUnfrozenParameterGotInNoSync) {
  expect_alike_fused(
      "unfrozen",
      [](Model& m) {
        const auto whole = m.sgd(0.05);
        m.backward(1);
        whole->step();
        for (auto& p : m.net->extra->parameters()) p.set_requires_grad(true);
        whole->zero_grad();
        const auto before = m.net->extra->weight.detach().clone();
        {
          const NoSync scope(m.prepare.no_sync_depth);
          m.backward(2);
        }
        whole->step();
        EXPECT_FALSE(at::equal(before, m.net->extra->weight));
      },
      [](Net& net) {
        for (auto& p : net->extra->parameters()) p.set_requires_grad(false);
      });
}

TEST(SeveralOptimizers, StepWithAveragesWhicheverIsFused) {
  for (const bool head_first : {true, false})
    for (const bool head_steps_first : {true, false})
      for (const double norm : {0.0, 0.01})
        expect_alike_fused("head and whole", [&](Model& m) {
          auto head = head_first ? m.sgd(m.head(), 0.1, {.max_grad_norm = norm}) : nullptr;
          const auto whole = m.sgd(0.05, {.max_grad_norm = norm * 3});
          if (!head) head = m.sgd(m.head(), 0.1, {.max_grad_norm = norm});
          EXPECT_EQ(whole->fused(), m.fuses());
          EXPECT_FALSE(head->fused());
          for (int step = 0; step < 4; ++step) {
            if (step != 2) whole->zero_grad();
            m.backward(step);
            if (head_steps_first) head->step();
            whole->step();
            if (!head_steps_first) head->step();
          }
        });
}

TEST(SeveralOptimizers, TheLastOneOverTheWholeModelIsFused) {
  expect_alike_fused("two over the whole model", [](Model& m) {
    auto first = m.optimizer(torch::optim::Adam(m.net->parameters(), 1e-3));
    EXPECT_EQ(first->fused(), m.fuses());
    m.backward(10);
    first->step();
    const auto second = m.sgd(0.05);
    EXPECT_FALSE(first->fused());
    EXPECT_EQ(second->fused(), m.fuses());
    for (int step = 0; step < 4; ++step) {
      if (step == 2) first.reset();
      EXPECT_EQ(second->fused(), m.fuses());
      second->zero_grad();
      m.backward(step);
      if (first) first->step();
      second->step();
    }
  });
}

TEST(SeveralOptimizers, AnUnfrozenPartMayHaveItsOwn) {
  const auto freeze = [](Net& net, bool frozen) {
    for (const auto& part : {net->in, net->middle, net->extra})
      for (auto& p : part->parameters()) p.set_requires_grad(!frozen);
  };
  for (const bool prepared : {true, false})
    for (const bool it_steps_first : {true, false})
      expect_alike_fused(
          "backbone",
          [&](Model& m) {
            const auto head = m.sgd(m.head(), 0.1);
            EXPECT_EQ(head->fused(), m.fuses());
            std::unique_ptr<torch::optim::Optimizer> backbone;
            for (int step = 0; step < 6; ++step) {
              if (step == 2) {
                freeze(m.net, false);
                std::vector<at::Tensor> rest;
                for (const auto& part : {m.net->in, m.net->middle, m.net->extra})
                  for (auto& p : part->parameters()) rest.push_back(p);
                if (prepared)
                  backbone = m.sgd(rest, 0.02);
                else
                  backbone = std::make_unique<torch::optim::SGD>(rest, torch::optim::SGDOptions(0.02));
              }
              m.net->zero_grad();
              m.backward(step);
              if (backbone && it_steps_first) backbone->step();
              head->step();
              if (backbone && !it_steps_first) backbone->step();
            }
            EXPECT_FALSE(head->fused());
          },
          [&](Net& net) { freeze(net, true); });
}

TEST(SeveralOptimizers, OneThatIsNotPreparedIsRightOrAnError) {
  for (const bool it_steps_first : {true, false})
    expect_error_fused("plain beside", "out.", [&](Model& m) {
      const auto whole = m.sgd(0.05);
      auto head = m.plain(m.head(), 0.1);
      for (int step = 0; step < 3; ++step) {
        whole->zero_grad();
        m.backward(step);
        if (it_steps_first) head.step();
        whole->step();
        if (!it_steps_first) head.step();
      }
    });
  expect_alike_fused("plain beside, with averages", [](Model& m) {
    const auto whole = m.sgd(0.05);
    auto head = m.plain(m.head(), 0.1);
    for (int step = 0; step < 3; ++step) {
      whole->zero_grad();
      m.backward(step);
      average_gradients(*whole);
      head.step();
      whole->step();
    }
  });
}

TEST(AFusedOptimizer, TakesWhatIsWrittenAlikeBeforeItsStep) {
  expect_alike_fused("decay by hand", [](Model& m) {
    const auto whole = m.sgd(0.05);
    for (int step = 0; step < 3; ++step) {
      whole->zero_grad();
      m.backward(step);
      for (auto& p : m.net->parameters()) p.data().mul_(0.99);
      whole->step();
    }
  });
}

TEST(AFusedOptimizer, RefusesWhatIsWrittenOnSomeRanksOnly) {
  for (const double norm : {0.0, 1.0})
    for (const bool through_pointer : {true, false})
      expect_error_fused("written by rank", "middle.weight", [&](Model& m) {
        const auto whole = m.sgd(0.05, {.max_grad_norm = norm});
        for (int step = 0; step < 2; ++step) {
          whole->zero_grad();
          m.backward(step);
          whole->step();
          if (step > 0 || world().rank() > 0) continue;
          if (through_pointer)
            m.net->middle->weight.data_ptr<double>()[4000] += 1;
          else
            m.net->middle->weight.set_data(m.net->middle->weight.detach() * 0.9);
        }
      });
  expect_error_fused("the state", "middle.bias", [&](Model& m) {
    const auto whole = m.sgd(0.05);
    for (int step = 0; step < 2; ++step) {
      m.backward(step);
      whole->step();
      whole->gather_state();
      auto& state = *whole->state().at(m.net->middle->bias.unsafeGetTensorImpl());
      if (world().rank() == 0) static_cast<torch::optim::SGDParamState&>(state).momentum_buffer().data().add_(1);
    }
  });
  expect_error_fused("a learning rate", "options", [&](Model& m) {
    const auto whole = m.sgd(0.05);
    whole->param_groups()[0].options().set_lr(0.01 * (1 + world().rank()));
    m.backward(1);
    whole->step();
  });
  expect_alike_fused("the same values, written on one rank", [](Model& m) {
    const auto whole = m.sgd(0.05);
    for (int step = 0; step < 3; ++step) {
      whole->zero_grad();
      m.backward(step);
      whole->step();
      if (world().rank() == 0) m.net->middle->weight.data().clamp_(-100, 100);
    }
  });
}

TEST(AFusedOptimizer, RefusesAParameterOfAnotherKindThanItWas) {
  if (world().size() == 1) GTEST_SKIP() << "one rank is not fused";
  const auto expect_refused = [](const std::function<void(at::Tensor&)>& change, const std::string& fact) {
    SCOPED_TRACE(fact);
    Model m(Fuse::always);
    const auto whole = m.sgd(0.05);
    m.backward(1);
    whole->step();
    m.backward(2);
    change(m.net->middle->weight);
    const auto bias = m.net->middle->bias.detach().clone();
    try {
      whole->step();
      FAIL() << "it was stepped";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(fact), std::string::npos) << error.what();
      EXPECT_EQ(error.code(), ExitCode::data);
    }
    EXPECT_TRUE(at::equal(m.net->middle->bias, bias));
  };
  expect_refused([](at::Tensor& p) { p.set_data(p.detach().to(at::kFloat)); }, "and is Float[96, 96]");
  expect_refused([](at::Tensor& p) { p.set_data(at::ones({2, 2}, at::kDouble)); }, "and is Double[2, 2]");
  expect_refused([](at::Tensor& p) { p.mutable_grad() = p.grad().to(at::kFloat); }, "the gradient of parameter");
  expect_refused([](at::Tensor& p) { p.mutable_grad() = at::ones({2, 2}, at::kDouble); }, "the gradient of parameter");
}

TEST(AFusedOptimizer, RefusesToBeginWithOtherWeightsOnSomeRanks) {
  expect_error_fused("before it is prepared", "middle.bias", [](Model& m) {
    if (m.fuse == Fuse::always && world().rank() == 0) m.net->middle->bias.data().add_(1);
    m.sgd(0.05);
  });
}

/// Sharpness-aware minimisation (Foret et al. 2021): the gradient where the loss is worst nearby.
void sam(Model& m, int step, PreparedOptimizer<torch::optim::SGD>& optimizer, bool averages) {
  optimizer.zero_grad();
  m.backward(step);
  if (averages) average_gradients(optimizer);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> before;
  for (auto& p : m.net->parameters()) {
    before.push_back(p.detach().clone());
    p.add_(p.grad() * 0.01);
  }
  optimizer.zero_grad();
  {
    const at::AutoGradMode grad(true);
    m.backward(step);
  }
  for (std::size_t i = 0; auto& p : m.net->parameters()) p.copy_(before[i++]);
  optimizer.step();
}

TEST(AFusedOptimizer, LeavesSharpnessAwareMinimisationRightOrSaysThatItIsNot) {
  const auto program = [](bool averages) {
    return [averages](Model& m) {
      const auto whole = m.sgd(0.005);
      for (int step = 0; step < 3; ++step) sam(m, step, *whole, averages);
    };
  };
  expect_error_fused("with its own gradients", "Fuse::never", program(false));
  expect_alike_fused("with averages", program(true));
}

TEST(AFusedOptimizer, RefusesGradientsThatWereChangedByHand) {
  for (const bool head_steps : {true, false})
    expect_error_fused("clipped", "max_grad_norm", [&](Model& m) {
      const auto whole = m.sgd(0.05), head = m.sgd(m.head(), 0.1);
      m.backward(1);
      torch::nn::utils::clip_grad_norm_(m.net->parameters(), 0.01);
      head_steps ? head->step() : whole->step();
    });
  expect_error_fused("on one rank, with a norm", "in.weight", [](Model& m) {
    const auto whole = m.sgd(0.05, {.max_grad_norm = 1});
    m.backward(1);
    if (m.fuses() && world().rank() == 0) m.net->in->weight.mutable_grad().mul_(2);
    whole->step();
  });
  expect_error_fused("between two backward()", "max_grad_norm", [](Model& m) {
    const auto whole = m.sgd(0.05);
    m.backward(1);
    torch::nn::utils::clip_grad_norm_(m.net->parameters(), 0.01);
    m.backward(2);
    whole->step();
  });
  expect_alike_fused("with averages, or thrown away", [](Model& m) {
    const auto whole = m.sgd(0.05);
    for (int step = 0; step < 4; ++step) {
      whole->zero_grad(step % 2 == 0);
      m.backward(step);
      if (step % 2 == 0) {
        average_gradients(*whole);
        torch::nn::utils::clip_grad_norm_(m.net->parameters(), 0.01);
      } else {
        torch::nn::utils::clip_grad_norm_(m.net->parameters(), 0.01);
        whole->zero_grad(step == 1);
        m.backward(step + 10);
      }
      whole->step();
    }
  });
}

TEST(GradientMark, SeesWhatIsWrittenBehindTorchsBack) {
  using gradients::GradientMark;
  for (const std::int64_t rows : {1, 3, 64, 1024}) {
    SCOPED_TRACE(rows);
    const auto gradient = at::sin(at::arange(rows * 1024).to(at::kFloat)).view({rows, 1024}).clone();
    const auto sees = [&](const std::function<void(at::Tensor)>& change) {
      const GradientMark mark(gradient);
      EXPECT_TRUE(mark == GradientMark(gradient));
      change(gradient.data());
      return !(mark == GradientMark(gradient));
    };
    EXPECT_TRUE(sees([](at::Tensor g) { g.clamp_(-0.9, 0.9); }));
    EXPECT_TRUE(sees([](at::Tensor g) { g.neg_(); }));
    EXPECT_TRUE(sees([](at::Tensor g) { g.view({-1}).narrow(0, 0, 1).add_(1); }));
    EXPECT_TRUE(sees([](at::Tensor g) { g.view({-1}).narrow(0, -1, 1).add_(1); }));
    for (std::int64_t row = 0; row + 2 <= rows; row += 7)
      EXPECT_TRUE(sees([&](at::Tensor g) { g.narrow(0, row, 2).mul_(0.5); })) << "rows from " << row;
    // A large gradient has enough lines that some are in any column.
    for (std::int64_t column = 0; rows >= 1024 && column < 1024; column += 31)
      EXPECT_TRUE(sees([&](at::Tensor g) { g.select(1, column).add_(1); })) << "column " << column;
  }
}

TEST(GradientMark, IsTheSameWhileSomebodyHoldsAView) {
  using gradients::GradientMark;
  const auto gradient = at::sin(at::arange(4096).to(at::kFloat)).clone();
  gradient.mul_(2);
  const GradientMark alone(gradient);
  {
    const auto view = gradient.view({64, 64});
    EXPECT_TRUE(alone == GradientMark(gradient));
    const GradientMark shared(gradient);
    view.neg_();
    EXPECT_FALSE(alone == GradientMark(gradient));
    EXPECT_FALSE(shared == GradientMark(gradient));
    view.neg_();
    EXPECT_TRUE(shared == GradientMark(gradient));
  }
  EXPECT_FALSE(alone == GradientMark(gradient)) << "it was written to";
}

TEST(AFusedOptimizer, TakesGradientsOfWhichSomebodyHoldsAView) {
  const auto program = [](bool to_none, bool before_the_last_pass) {
    return [=](Model& m) {
      const auto whole = m.sgd(0.05);
      for (int step = 0; step < 3; ++step) {
        whole->zero_grad(to_none);
        m.backward(step);
        std::vector<at::Tensor> held;
        const auto hold = [&] {
          for (const auto& p : m.net->parameters()) {
            held.push_back(p.grad().detach());
            held.push_back(p.grad().view({-1}));
          }
        };
        if (before_the_last_pass) hold();
        m.backward(step + 10);
        if (before_the_last_pass)
          held.clear();
        else
          hold();
        whole->step();
      }
    };
  };
  for (const bool to_none : {true, false}) {
    expect_alike_fused("over the step", program(to_none, false));
    expect_alike_fused("over a pass", program(to_none, true));
  }
}

TEST(AFusedOptimizer, ClipsAfterUnscaling) {
  for (const bool by_hand : {true, false})
    expect_alike_fused("scaled", [&](Model& m) {
      GradScaler scaler(world().duplicate(), at::kCPU, {.init_scale = 64});
      const auto head = m.sgd(m.head(), 0.1);
      const auto whole = m.sgd(0.05);
      for (int step = 0; step < 4; ++step) {
        whole->zero_grad();
        scaler.scale(m.loss(step)).backward();
        if (by_hand) {
          scaler.unscale_(*whole);
          torch::nn::utils::clip_grad_norm_(m.net->parameters(), 0.01);
        }
        scaler.step(*whole);
        scaler.update();
        head->step();
      }
    });
}

TEST(AFusedOptimizer, LeavesMemoryThatOthersHaveAsItIs) {
  // Two parameters over one storage, and a tensor of one of them.
  const auto share = [](Net& net) {
    const at::NoGradGuard no_grad;
    net->extra->weight.set_data(net->middle->weight.detach().t());
  };
  expect_alike_fused(
      "two over one storage",
      [](Model& m) {
        const auto whole = m.sgd(0.05);
        EXPECT_FALSE(whole->fused());
        for (int step = 0; step < 3; ++step) {
          whole->zero_grad();
          m.backward(step);
          whole->step();
        }
        EXPECT_TRUE(at::equal(m.net->extra->weight, m.net->middle->weight.t()));
      },
      share);
  expect_alike_fused("detached before, on one rank", [](Model& m) {
    const auto alias = m.net->middle->weight.detach();
    const auto kept = world().rank() == 0 ? m.net->out->weight.detach() : at::Tensor();
    const auto whole = m.sgd(0.05);
    EXPECT_FALSE(whole->fused());
    for (int step = 0; step < 3; ++step) {
      whole->zero_grad();
      m.backward(step);
      whole->step();
      alias.mul_(0.9);
    }
    EXPECT_TRUE(at::equal(m.net->middle->weight, alias));
  });
}

TEST(AFusedOptimizer, TakesParametersAndStateThatHaveChangedPlaces) {
  expect_alike_fused("two weights", [](Model& m) {
    const auto whole = m.sgd(0.05);
    for (int step = 0; step < 4; ++step) {
      auto kept = m.net->middle->weight.data();
      m.net->middle->weight.set_data(m.net->extra->weight.data());
      m.net->extra->weight.set_data(kept);
      whole->zero_grad();
      m.backward(step);
      whole->step();
    }
  });
  expect_alike_fused("two moments", [](Model& m) {
    const auto adam = m.optimizer(torch::optim::Adam(m.net->parameters(), 1e-3));
    for (int step = 0; step < 4; ++step) {
      adam->zero_grad();
      m.backward(step);
      adam->step();
      adam->gather_state();
      auto& state = adam->state();
      const auto of = [&](const at::Tensor& p) -> torch::optim::AdamParamState& {
        return static_cast<torch::optim::AdamParamState&>(*state.at(p.unsafeGetTensorImpl()));
      };
      auto &one = of(m.net->middle->weight), &other = of(m.net->extra->weight);
      const auto kept = one.exp_avg();
      one.exp_avg(other.exp_avg());
      other.exp_avg(kept);
    }
  });
}

TEST(AFusedOptimizer, TakesNegativeViews) {
  const auto negate = [](Net& net) {
    const at::NoGradGuard no_grad;
    net->middle->weight.set_data(at::_neg_view(net->middle->weight.detach().clone()));
  };
  for (const bool before : {true, false})
    expect_alike_fused(
        before ? "from the start" : "later",
        [&](Model& m) {
          const auto whole = m.sgd(0.05);
          for (int step = 0; step < 3; ++step) {
            if (!before && step == 1) negate(m.net);
            whole->zero_grad();
            m.backward(step);
            whole->step();
          }
        },
        before ? negate : std::function<void(Net&)>([](Net&) {}));
}

TEST(AFusedOptimizer, RefusesGradientsThatWereChangedAfterNoSync) {
  for (const bool after_a_pass : {true, false})
    expect_error_fused("after passes in no_sync()", "max_grad_norm", [&](Model& m) {
      const auto whole = m.sgd(0.05);
      if (after_a_pass) m.backward(1);
      {
        const NoSync scope(m.prepare.no_sync_depth);
        m.backward(2);
      }
      if (m.fuses() && world().rank() == 0) m.net->middle->weight.mutable_grad().mul_(10);
      whole->step();
    });
}

TEST(AFusedOptimizer, TakesGradientsThatAreViewsOfOneMemory) {
  expect_alike_fused("one buffer", [](Model& m) {
    const auto whole = m.sgd(0.05, {.max_grad_norm = 0.01});
    std::int64_t count = 0;
    for (const auto& p : m.net->parameters()) count += p.numel();
    const auto flat = at::zeros({count}, m.net->in->weight.options().requires_grad(false));
    std::int64_t first = 0;
    for (auto& p : m.net->parameters()) {
      p.mutable_grad() = flat.narrow(0, first, p.numel()).view(p.sizes());
      first += p.numel();
    }
    for (int step = 0; step < 3; ++step) {
      flat.zero_();
      m.backward(step);
      m.backward(step + 10);
      whole->step();
    }
  });
}

TEST(AFusedOptimizer, NeedNotKnowWhichPagesWereWritten) {
  expect_alike_fused("without a page map", [](Model& m) {
    std::optional<test::IoError> unreadable(std::in_place, "open", "/proc/self/pagemap", EACCES);
    const auto whole = m.sgd(0.05);
    unreadable.reset();
    for (int step = 0; step < 6; ++step) {
      whole->zero_grad();
      m.backward(step);
      whole->step();
      // Changes nothing, but makes the pages this rank's own.
      for (auto& p : m.net->parameters()) p.data().clamp_(-100, 100);
      if (step == 3) m.net->middle->weight.data().mul_(0.9);
    }
  });
}

/// LBFGS of torch alone, on the batches of all ranks in their weights.
TEST(PreparedLbfgs, IsTorchsOnTheMeanOfTheLosses) {
  const auto options = torch::optim::LBFGSOptions(0.5).max_iter(8).line_search_fn("strong_wolfe");
  for (const bool beside_a_fused_one : {true, false})
    for (const auto& [uneven, given] : {std::pair{true, false}, {false, false}, {true, true}}) {
      SCOPED_TRACE(std::to_string(beside_a_fused_one) + std::to_string(uneven) + std::to_string(given));
      Model m(Fuse::always);
      std::vector<double> share(static_cast<std::size_t>(world().size()), 1.0 / world().size());
      if (uneven && world().size() > 1) {
        share.front() = 0;
        for (std::size_t r = 1; r < share.size(); ++r) share[r] = 1.0 / static_cast<double>(share.size() - 1);
        if (given) {
          m.prepare.weight->given = world().rank() == 0 ? 0 : 700;
        } else {
          m.prepare.weight->local = world().rank() == 0 ? 0 : 2;
          m.prepare.weight->global = 2 * (world().size() - 1);
        }
      }
      const auto adam = beside_a_fused_one ? m.optimizer(torch::optim::Adam(m.net->parameters(), 1e-3)) : nullptr;
      const auto lbfgs = m.optimizer(torch::optim::LBFGS(m.net->parameters(), options));
      Net alone;
      alone->to(at::kDouble);
      torch::optim::LBFGS plain(alone->parameters(), options);
      const auto of_rank = [](Net& net, int rank, int step) {
        const auto x = at::sin(at::arange(15, at::kDouble).view({5, 3}) * 1.7 + step + rank * 0.9);
        return net->forward(x, true).sub(at::cos(x.narrow(1, 0, 2)) * 3).square().mean();
      };
      int evaluations = 0, plain_evaluations = 0;
      for (int step = 0; step < 3; ++step) {
        const auto loss = lbfgs->step([&] {
          ++evaluations;
          lbfgs->zero_grad();
          auto mine = of_rank(m.net, world().rank(), step);
          if (share[static_cast<std::size_t>(world().rank())] == 0) mine = mine * std::nan("");
          mine.backward();
          return mine;
        });
        const auto want = plain.step([&] {
          ++plain_evaluations;
          plain.zero_grad();
          auto sum = at::zeros({}, at::kDouble);
          for (int r = 0; r < world().size(); ++r)
            if (const auto part = share[static_cast<std::size_t>(r)]; part > 0)
              sum = sum + of_rank(alone, r, step) * part;
          sum.backward();
          return sum;
        });
        EXPECT_NEAR(loss.item<double>(), want.item<double>(), 1e-9);
      }
      EXPECT_EQ(evaluations, plain_evaluations);
      const auto have = m.net->named_parameters(), want = alone->named_parameters();
      for (std::size_t i = 0; i < have.size(); ++i) {
        expect_same_bits_everywhere(have[i].value(), have[i].key());
        EXPECT_TRUE(at::allclose(have[i].value(), want[i].value(), 1e-6, 1e-7)) << have[i].key();
      }
    }
}

/// Extragradient (Korpelevich 1976): the gradient of a point that its own gradient leads to.
struct Extragradient : torch::optim::Optimizer {
  Extragradient(std::vector<at::Tensor> parameters, double rate)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<torch::optim::SGDOptions>(rate)),
        lr(rate) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    std::vector<at::Tensor> before;
    for (const auto& p : param_groups()[0].params()) before.push_back(p.detach().clone());
    descend();
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode grad(true);
      loss = closure();
      for (std::size_t i = 0; auto& p : param_groups()[0].params()) p.data().copy_(before[i++]);
      descend();
    }
    return loss;
  }
  void descend() {
    for (auto& p : param_groups()[0].params())
      if (p.grad().defined()) p.data().sub_(p.grad(), lr);
  }
  double lr;
};

TEST(PreparedOptimizer, OfTheUsersOwnTypeEvaluatesItsClosure) {
  for (const bool beside_a_fused_one : {true, false}) {
    SCOPED_TRACE(beside_a_fused_one);
    Model m(Fuse::always);
    const auto adam = beside_a_fused_one ? m.optimizer(torch::optim::Adam(m.net->parameters(), 1e-3)) : nullptr;
    const auto own = m.optimizer(Extragradient(m.net->parameters(), 0.01));
    EXPECT_FALSE(own->fused());
    Net alone;
    alone->to(at::kDouble);
    Extragradient plain(alone->parameters(), 0.01);
    const auto of_rank = [](Net& net, int rank, int step) {
      const auto x = at::sin(at::arange(15, at::kDouble).view({5, 3}) * 1.7 + step + rank * 0.9);
      return net->forward(x, true).sub(at::cos(x.narrow(1, 0, 2)) * 3).square().mean();
    };
    for (int step = 0; step < 3; ++step) {
      const auto pass = [&] {
        own->zero_grad();
        const auto mine = of_rank(m.net, world().rank(), step);
        mine.backward();
        return mine;
      };
      const auto pass_alone = [&] {
        plain.zero_grad();
        auto sum = at::zeros({}, at::kDouble);
        for (int r = 0; r < world().size(); ++r) sum = sum + of_rank(alone, r, step) / world().size();
        sum.backward();
        return sum;
      };
      pass();
      pass_alone();
      EXPECT_NEAR(own->step(pass).item<double>(), plain.step(pass_alone).item<double>(), 1e-9);
    }
    const auto have = m.net->named_parameters(), want = alone->named_parameters();
    for (std::size_t i = 0; i < have.size(); ++i) {
      expect_same_bits_everywhere(have[i].value(), have[i].key());
      EXPECT_TRUE(at::allclose(have[i].value(), want[i].value(), 1e-9, 1e-10)) << have[i].key();
    }
    m.backward(7);
    own->step();  // without a closure it steps with what is there
  }
}

TEST(PreparedOptimizer, ScalesNoGradientsBetweenEvaluations) {
  Model m(Fuse::never);
  const auto own = m.optimizer(Extragradient(m.net->parameters(), 0.01), {.max_grad_norm = 1});
  m.backward(1);
  EXPECT_NO_THROW(own->step());
  try {
    own->step([&] { return m.loss(1); });
    FAIL() << "it was stepped";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_NE(std::string(error.what()).find("max_grad_norm"), std::string::npos) << error.what();
  }
  const auto sgd = m.sgd(0.05, {.max_grad_norm = 1});
  EXPECT_NO_THROW(sgd->step([&] {
    m.backward(1);
    return at::Tensor();
  }));
}

TEST(MemorySnapshot, StaysAsItWasWhileStepsGoOn) {
  if (test::averaging_ranks().topology().num_nodes == world().size()) GTEST_SKIP() << "no ranks share memory";
  if (test::averaging_ranks().topology().num_nodes > 1) GTEST_SKIP() << "over nodes, saves copy";
  const auto snapshot_sources = std::make_shared<SnapshotSources>();
  Training<torch::optim::Adam> fused(torch::optim::AdamOptions(0.01), {.fuse = Fuse::always}, snapshot_sources);
  Training<torch::optim::Adam> plain(torch::optim::AdamOptions(0.01), {.fuse = Fuse::never});
  int number = 0;
  const auto step = [&](bool use_extra) {
    ++number;
    fused.step(number, use_extra);
    plain.step(number, use_extra);
  };
  step(true);
  ASSERT_EQ(snapshot_sources->size(), 1u);
  for (int save = 0; save < 3; ++save) {
    const auto frozen = snapshot_sources->front()->take_snapshot();
    ASSERT_TRUE(frozen);
    const auto& weight = fused.net->middle->weight;
    const auto* const data = static_cast<const std::byte*>(weight.const_data_ptr());
    ASSERT_TRUE(data >= frozen->live_data && data < frozen->live_data + frozen->bytes);
    const std::vector<std::byte> before(frozen->snapshot_data.get(), frozen->snapshot_data.get() + frozen->bytes);
    EXPECT_TRUE(std::equal(before.begin(), before.end(), frozen->live_data));
    step(save != 1);  // what is not stepped is taken along
    step(true);
    EXPECT_TRUE(std::equal(before.begin(), before.end(), frozen->snapshot_data.get())) << "after save " << save;
    world().barrier();
    fused.expect_same_as(plain, "save " + std::to_string(save));
  }
  {
    const at::NoGradGuard no_grad;
    for (auto* const net : {&fused.net, &plain.net}) (*net)->in->weight.mul_(0.5);
  }
  EXPECT_FALSE(snapshot_sources->front()->take_snapshot()) << "what was written to by hand is not in the shared copy";
  step(true);
  fused.expect_same_as(plain, "after a change by hand");
}

}  // namespace
}  // namespace muster::detail::optim::optimizer_test
