// Activations that are computed again in backward(): the same bits, less memory.
#include "muster/recompute.hpp"

#include "gradients/reducer.hpp"
#include "muster/error.hpp"
#include "muster/mixed_precision.hpp"
#include "support/job.hpp"
#include "support/prepared.hpp"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace muster::recompute_test {
namespace {

namespace nn = torch::nn;
using test::world;

at::Tensor values(at::IntArrayRef sizes, double seed) {
  return at::sin(at::arange(at::empty(sizes).numel(), at::kDouble) * 1.7 + seed * 3.1).to(at::kFloat).view(sizes);
}

at::Tensor random_state() { return at::globalContext().defaultGenerator(at::kCPU).get_state(); }

/// Two stages with dropout and batch-norm, recomputed or not.
struct NetImpl : nn::Module {
  explicit NetImpl(bool recomputes) : recomputes(recomputes) {
    register_module("in", in);
    register_module("first", first);
    register_module("second", second);
    register_module("out", out);
    double seed = 0;
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.copy_(values(parameter.sizes(), ++seed) / 2);
  }
  static nn::Sequential stage() {
    return nn::Sequential(nn::Linear(6, 12), nn::BatchNorm1d(12), nn::ReLU(), nn::Dropout(0.3), nn::Linear(12, 6));
  }
  at::Tensor forward(at::Tensor x) {
    x = in->forward(x);
    x = x + (recomputes ? recompute(first, x) : first->forward(x));
    x = recomputes ? recompute([&](const at::Tensor& y) { return torch::tanh(second->forward(y)); }, x)
                   : torch::tanh(second->forward(x));
    return out->forward(x);
  }
  bool recomputes;
  nn::Linear in{3, 6}, out{6, 1};
  nn::Sequential first = stage(), second = stage();
};
TORCH_MODULE(Net);

void expect_equal_gradients(nn::Module& have, nn::Module& want) {
  const auto parameters = want.named_parameters();
  for (const auto& item : have.named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_TRUE(at::equal(item.value().grad(), parameters[item.key()].grad())) << item.key();
  }
}

TEST(Recompute, GivesTheSameBits) {
  Net net(true), plain(false);
  for (int step = 0; step < 3; ++step) {
    std::vector<at::Tensor> losses, inputs, states;
    for (auto model : {net, plain}) {
      at::manual_seed(static_cast<std::uint64_t>(step));
      model->zero_grad();
      inputs.push_back(values({8, 3}, step).requires_grad_());
      losses.push_back(model->forward(inputs.back()).square().mean());
      losses.back().backward();
      states.push_back(random_state());
    }
    EXPECT_TRUE(at::equal(losses[0], losses[1]));
    EXPECT_TRUE(at::equal(inputs[0].grad(), inputs[1].grad()));
    EXPECT_TRUE(at::equal(states[0], states[1])) << "what is drawn next must not depend on it";
    expect_equal_gradients(*net, *plain);
  }
}

TEST(Recompute, WritesTheStatisticsOfAModuleOnce) {
  nn::Sequential block(nn::Linear(3, 4), nn::BatchNorm1d(4)), plain(nn::Linear(3, 4), nn::BatchNorm1d(4));
  {
    const at::NoGradGuard no_grad;
    const auto from = block->parameters();
    for (std::size_t i = 0; i < from.size(); ++i) plain->parameters()[i].copy_(from[i]);
  }
  const auto x = values({8, 3}, 1);
  recompute(block, x).sum().backward();
  plain->forward(x).sum().backward();
  const auto want = plain->named_buffers();
  for (const auto& item : block->named_buffers()) EXPECT_TRUE(at::equal(item.value(), want[item.key()])) << item.key();

  // Beside a graph that has saved them.
  (recompute(block, x) + block->forward(x) + recompute(block, x)).sum().backward();
  EXPECT_EQ(block->named_buffers()["1.num_batches_tracked"].item<std::int64_t>(), 4);
}

TEST(Recompute, KeepsNoActivation) {
  const auto kept = [](bool recomputes) {
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> made;
    const auto w = values({64, 64}, 1).requires_grad_();
    const auto block = [&](const at::Tensor& x) {
      at::Tensor y = x;
      for (int i = 0; i < 5; ++i) {
        y = torch::tanh(torch::matmul(y, w));
        made.emplace_back(y.storage().getWeakStorageImpl());
      }
      return y;
    };
    const auto x = values({64, 64}, 2).requires_grad_();
    auto y = recomputes ? recompute(block, x) : block(x);
    const auto live = std::ranges::count_if(made, [](const auto& storage) { return !storage.expired(); });
    y.sum().backward();
    y.reset();
    EXPECT_TRUE(std::ranges::all_of(made, [](const auto& storage) { return storage.expired(); }));
    return live;
  };
  EXPECT_EQ(kept(false), 5);
  EXPECT_EQ(kept(true), 1);  // the result
}

TEST(Recompute, AModuleRunsAgainInTheModeItHadBefore) {
  std::vector<std::shared_ptr<NetImpl>> nets;
  for (const bool recomputes : {true, false}) {
    Net net(recomputes);
    at::manual_seed(3);
    // The one block that is a module: the mode of others is theirs to keep.
    const auto x = net->in->forward(values({8, 3}, 1));
    const auto y = x + (recomputes ? recompute(net->first, x) : net->first->forward(x));
    net->eval();  // to look at a metric, say
    y.square().sum().backward();
    EXPECT_FALSE(net->first->is_training() || net->first[3]->as<nn::Dropout>()->is_training());
    nets.push_back(net.ptr());
  }
  for (const auto& item : nets[1]->first->named_parameters())
    EXPECT_TRUE(at::equal(nets[0]->first->named_parameters()[item.key()].grad(), item.value().grad())) << item.key();
}

TEST(Recompute, TakesAndGivesSeveralTensors) {
  nn::Embedding words(nn::EmbeddingOptions(10, 4));
  const auto tokens = at::arange(6) % 10;
  const auto scale = values({4}, 1).requires_grad_(), unused = values({4}, 2).requires_grad_();
  const at::Tensor undefined;
  const auto block = [&](const at::Tensor& t, const at::Tensor& s, const at::Tensor&, const at::Tensor& none) {
    EXPECT_FALSE(none.defined());
    const auto e = words->forward(t) * s;
    return std::tuple(e, t + 1, e.sum());
  };
  const auto [a, b, c] = recompute(block, tokens, scale, unused, undefined);
  EXPECT_TRUE(at::equal(b, tokens + 1));
  EXPECT_FALSE(b.requires_grad());
  (a.square().sum() + c).backward();
  const auto of_words = words->weight.grad().clone(), of_scale = scale.grad().clone();
  EXPECT_FALSE(unused.grad().defined());

  words->zero_grad();
  scale.mutable_grad().reset();
  const auto [d, e, f] = block(tokens, scale, unused, undefined);
  (d.square().sum() + f).backward();
  EXPECT_TRUE(at::allclose(words->weight.grad(), of_words));
  EXPECT_TRUE(at::allclose(scale.grad(), of_scale));

  const auto pair = recompute([](const at::Tensor& x) { return std::vector{x * 2, x * 3}; }, scale);
  scale.mutable_grad().reset();
  pair[1].sum().backward();  // the other has no gradient
  EXPECT_TRUE(at::equal(scale.grad(), at::full({4}, 3.0)));
  const auto none = recompute([&] { return scale * 2; });
  none.sum().backward();
  EXPECT_TRUE(at::equal(scale.grad(), at::full({4}, 5.0)));
}

TEST(Recompute, ABlockMayUseWhatItLikes) {
  // A parameter, a tensor from before with a history, one parameter in two places, one that is assigned into a slice,
  // a result that is an input or a parameter.
  const auto gradients = [](bool recomputes) {
    const auto w = values({3, 3}, 1).requires_grad_(), b = values({3}, 2).requires_grad_(),
               x = values({3, 3}, 3).requires_grad_();
    const auto h = torch::matmul(x, w);
    const auto block = [&](const at::Tensor& given) {
      auto rows = at::zeros({3, 3});
      rows[0] = b;
      rows[1].copy_(given[1]);
      return std::tuple(torch::matmul(torch::sigmoid(given * h), w) + rows, given, b);
    };
    const auto [y, same, bias] = recomputes ? recompute(block, h) : block(h);
    (y.square().sum() + 2 * same.sum() + 3 * bias.sum()).backward();
    return std::vector{w.grad(), b.grad(), x.grad()};
  };
  const auto have = gradients(true), want = gradients(false);
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::allclose(have[i], want[i], 1e-6)) << i;
}

TEST(Recompute, StandsInsideOfItself) {
  const auto gradients = [](bool recomputes) {
    at::manual_seed(3);
    NetImpl net(false);
    const auto inner = [&](const at::Tensor& y) { return torch::dropout(net.first->forward(y), 0.2, true); };
    const auto outer = [&](const at::Tensor& y) {
      return net.second->forward(torch::relu(recomputes ? recompute(inner, y) : inner(y)));
    };
    const auto x = net.in->forward(values({8, 3}, 1));
    net.out->forward(recomputes ? recompute(outer, x) : outer(x)).square().mean().backward();
    std::vector<at::Tensor> all;
    for (const auto& parameter : net.parameters()) all.push_back(parameter.grad());
    return all;
  };
  const auto have = gradients(true), want = gradients(false);
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::equal(have[i], want[i])) << i;
}

TEST(Recompute, UnderAutocast) {
  const auto gradients = [](bool recomputes) {
    NetImpl net(recomputes);
    at::manual_seed(1);
    at::Tensor loss;
    {
      const Autocast scope(at::kCPU);
      const auto y = net.forward(values({8, 3}, 1));
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
      loss = y.to(at::kFloat).square().mean();
    }
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    loss.backward();
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    std::vector<at::Tensor> all;
    for (const auto& parameter : net.parameters()) all.push_back(parameter.grad());
    return all;
  };
  const auto have = gradients(true), want = gradients(false);
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::equal(have[i], want[i])) << i;
}

// Autocast casts a weight once for all its uses in a scope, so their gradients are added in 16 bits.
TEST(Recompute, UnderAutocastHasTheBitsOfAWeightThatIsUsedAgain) {
  enum class Use {
    twice_inside,
    before_it,
    after_it,
    own_scope,
    in_two_blocks,
    in_a_block_inside,
    as_input,
    of_a_float
  };
  const auto gradients = [](Use use, bool recomputes) {
    nn::Linear shared(6, 6), other(6, 6);
    {
      const at::NoGradGuard no_grad;
      double seed = 0;
      for (auto* net : {&shared, &other})
        for (auto& parameter : (*net)->parameters()) parameter.copy_(values(parameter.sizes(), ++seed) * 2);
    }
    const auto block = [recomputes](const auto& function, const auto&... inputs) {
      return recomputes ? recompute(function, inputs...) : function(inputs...);
    };
    const auto module = shared.ptr();
    const auto once = [module](const at::Tensor& x) { return module->forward(x); };
    const auto twice = [module](const at::Tensor& x) { return module->forward(torch::tanh(module->forward(x))); };
    auto y = values({64, 6}, 3).requires_grad_();
    {
      const Autocast scope(at::kCPU, {.enabled = use != Use::own_scope});
      auto x = other->forward(y);
      switch (use) {
        case Use::twice_inside:
          x = block(twice, x);
          break;
        case Use::before_it:
          x = block(once, torch::tanh(shared->forward(x)));
          break;
        case Use::after_it:
          x = shared->forward(torch::tanh(block(once, x)));
          break;
        case Use::own_scope:
          x = block(
              [twice](const at::Tensor& given) {
                const Autocast inside(at::kCPU);
                return twice(given);
              },
              x);
          break;
        case Use::in_two_blocks:
          x = block(once, torch::tanh(block(once, x)));
          break;
        case Use::in_a_block_inside:
          x = block([block, twice](const at::Tensor& given) { return torch::tanh(block(twice, given)); }, x);
          break;
        case Use::as_input:
          x = block(
              [](const at::Tensor& given, const at::Tensor& weight) {
                return torch::nn::functional::linear(torch::tanh(torch::nn::functional::linear(given, weight)), weight);
              },
              x, shared->weight);
          break;
        case Use::of_a_float:
          x = block(twice, x.to(at::kFloat));
          break;
      }
      y = x;
    }
    y.to(at::kFloat).square().mean().backward();
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    std::vector<at::Tensor> all;
    for (auto* net : {&shared, &other})
      for (const auto& parameter : (*net)->parameters()) all.push_back(parameter.grad());
    return all;
  };
  for (int use = 0; use <= static_cast<int>(Use::of_a_float); ++use) {
    const auto have = gradients(static_cast<Use>(use), true), want = gradients(static_cast<Use>(use), false);
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(have[i].defined(), want[i].defined()) << use;
      if (want[i].defined()) {
        EXPECT_TRUE(at::equal(have[i], want[i])) << use << ", parameter " << i;
      }
    }
  }
}

// The casts of a block's inputs are activations, too.
TEST(Recompute, UnderAutocastKeepsNoCastOfAnInput) {
  nn::Linear net(4, 4);
  const Autocast scope(at::kCPU);
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> casts;  // of the first run and the second
  const auto x = (net->weight.sum() * at::ones({8, 4})).to(at::kFloat);
  const auto y = recompute(
      [&](const at::Tensor& given) {
        const auto narrow = at::autocast::cached_cast(at::kBFloat16, given, at::kCPU);
        casts.push_back(narrow.storage().getWeakStorageImpl());
        return at::relu(narrow) * 2;
      },
      x);
  EXPECT_TRUE(casts.at(0).expired());
  y.sum().backward();
  EXPECT_TRUE(casts.at(1).expired());
}

TEST(Recompute, RunsOnceWhereNoGradientIsNeeded) {
  int runs = 0;
  const auto block = [&](const at::Tensor& x) { return ++runs, x * 2; };
  const auto x = values({3}, 1);
  EXPECT_FALSE(recompute(block, x).requires_grad());
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(recompute(block, x.clone().requires_grad_()).requires_grad());
  }
  EXPECT_EQ(runs, 2);
  recompute(block, x.clone().requires_grad_()).sum().backward();
  EXPECT_EQ(runs, 4);
}

TEST(Recompute, OneBackwardAfterTheOtherIsAsWithoutIt) {
  const auto x = values({3}, 1).requires_grad_();
  const auto y = recompute([](const at::Tensor& t) { return t.square(); }, x);
  y.sum().backward({}, /*keep_graph=*/true);
  const auto once = x.grad().clone();
  const auto alone = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true);
  EXPECT_TRUE(at::equal(alone[0], once));
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), 2 * once));
  EXPECT_THROW(y.sum().backward(), Error);
  const auto z = recompute([](const at::Tensor& t) { return t.square(); }, x);
  EXPECT_THROW(torch::autograd::grad({z.sum()}, {x}, {}, true, /*create_graph=*/true), Error);
}

TEST(Recompute, HooksRunOnce) {
  const auto w = values({3}, 1).requires_grad_(), x = values({3}, 2).requires_grad_();
  int of_w = 0, of_x = 0;
  w.register_hook([&](const at::Tensor& gradient) { return ++of_w, gradient * 2; });
  x.register_hook([&](const at::Tensor& gradient) { return ++of_x, gradient * 3; });
  recompute([&](const at::Tensor& t) { return t * w; }, x).sum().backward();
  EXPECT_EQ(of_w, 1);
  EXPECT_EQ(of_x, 1);
  EXPECT_TRUE(at::equal(w.grad(), x.detach() * 2));
  EXPECT_TRUE(at::equal(x.grad(), w.detach() * 3));
}

TEST(Recompute, AnExceptionEndsItAsItWouldWithoutIt) {
  const auto x = values({3}, 1).requires_grad_();
  int run = 0, bad = 1;
  const auto block = [&](const at::Tensor& t) {
    const auto y = torch::dropout(t, 0.5, true);
    if (++run == bad) throw std::runtime_error("the block is ill");
    return y;
  };
  EXPECT_THROW(recompute(block, x), std::runtime_error);
  const auto y = recompute(block, x);
  bad = run + 1;
  const auto before = random_state();
  EXPECT_THROW(y.sum().backward({}, true), std::runtime_error);
  EXPECT_TRUE(at::equal(random_state(), before));
  EXPECT_FALSE(x.grad().defined());
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(Recompute, WhatIsNotTheSameTheSecondTimeIsAnError) {
  const auto x = values({4}, 1).requires_grad_(), w = values({4}, 2).requires_grad_();
  const auto error_of = [&](const std::function<at::Tensor(const at::Tensor&)>& block) -> std::string {
    try {
      recompute(block, x).sum().backward();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::user_error);
      return error.what();
    }
    return "no error";
  };
  int run = 0;
  EXPECT_NE(error_of([&](const at::Tensor& t) { return (t * 2).narrow(0, 0, ++run); }).find("it has made [2]"),
            std::string::npos);
  run = 0;
  const auto more_and_more = [&](const at::Tensor& t) {
    return recompute([&](const at::Tensor& u) { return std::vector(static_cast<std::size_t>(++run), u * w); }, t)[0];
  };
  try {
    more_and_more(x).sum().backward();
    ADD_FAILURE() << "two tensors were taken for one";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("it has made 2 tensors, but 1 in the forward pass"), std::string::npos);
  }
  run = 0;
  EXPECT_NE(error_of([&](const at::Tensor& t) { return run++ == 0 ? t * 2 : t * w; }).find("other tensors"),
            std::string::npos);
  run = 0;
  EXPECT_NE(error_of([&](const at::Tensor& t) { return run++ == 0 ? t * w : t * 2; }).find("other tensors"),
            std::string::npos);
  // An input that has been written to, by the block too: torch's own words.
  EXPECT_THROW(recompute([&](const at::Tensor& t) { return t.add_(1) * w; }, values({4}, 3)).sum().backward(),
               c10::Error);
  auto input = values({4}, 3);
  const auto y = recompute([&](const at::Tensor& t) { return t * w; }, input);
  input.add_(1);
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST(Recompute, AParameterThatHasBeenWrittenToIsAnError) {
  nn::Linear block(3, 3);
  const auto x = values({2, 3}, 1).requires_grad_();
  const auto before = recompute(block, x);
  {
    const at::NoGradGuard no_grad;
    block->bias.add_(1);
  }
  try {
    before.sum().backward();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::user_error);
    EXPECT_NE(std::string(error.what()).find("has been written to since the forward pass"), std::string::npos)
        << error.what();
  }
  recompute(block, x).sum().backward();
}

TEST(Recompute, ABufferMayGrow) {
  struct GrowingImpl : nn::Module {
    at::Tensor seen = register_buffer("seen", at::zeros({1}));
    nn::Linear linear = register_module("linear", nn::Linear(2, 2));
    at::Tensor forward(const at::Tensor& x) {
      seen.set_data(at::cat({seen.detach(), at::ones({1})}));
      return linear(x);
    }
  };
  const auto net = std::make_shared<GrowingImpl>();
  recompute(net, at::ones({2, 2})).sum().backward();
  EXPECT_EQ(net->seen.numel(), 2) << "written once";
}

// --- With ranks ---

TEST(Recompute, GradientsAreAveragedOnce) {
  const test::Preparation prepare;
  Net net(true), plain(false);
  const auto prepared = prepare(net.ptr()), other = prepare(plain.ptr());
  for (int step = 0; step < 3; ++step) {
    for (auto model : {net, plain}) {
      at::manual_seed(static_cast<std::uint64_t>(step));
      model->zero_grad();
      model->forward(test::values({8, 3}, step)).square().mean().backward();
    }
    expect_equal_gradients(*net, *plain);
  }
  EXPECT_EQ(prepared->reducer()->averaged_round_count(), 3);
  // An exception in the second run leaves the reducer as any other in backward().
  bool ill = false;
  const auto block = [&](const at::Tensor& x) {
    if (ill) throw std::runtime_error("the block is ill");
    ill = true;
    return net->first->forward(x);
  };
  EXPECT_THROW(recompute(block, net->in->forward(test::values({8, 3}, 1))).sum().backward(), std::runtime_error);
  for (auto model : {net, plain}) {
    at::manual_seed(9);
    model->zero_grad();
    model->forward(test::values({8, 3}, 5)).square().mean().backward();
  }
  expect_equal_gradients(*net, *plain);
}

StateDict trained(const std::filesystem::path& storage, bool recomputes, Fuse fuse, int virtual_workers) {
  const auto loop = [&](Session& session, const Config&) {
    Net model(recomputes);
    auto net = session.prepare_model(model);
    auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), 0.05), {.fuse = fuse});
    EXPECT_EQ(optimizer.fused(), fuse == Fuse::always && session.world_size() > 1 && virtual_workers == 0);
    auto state = session.state({{"model", net}});
    for ([[maybe_unused]] auto epoch : session.epochs(2)) {
      for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 2})) {
        optimizer.zero_grad();
        torch::mse_loss(net->forward(batch["x"].expand({-1, 3})), batch["y"]).backward();
        optimizer.step();
      }
      session.report({}, state);
    }
  };
  const auto x = at::arange(48, at::kFloat).unsqueeze(1) / 48;
  TorchTrainerOptions options{
      .run_config = {.name = std::string(recomputes ? "recomputed" : "plain") + std::to_string(static_cast<int>(fuse)) +
                             std::to_string(virtual_workers)},
      .datasets = {{"train", Dataset::from_tensors({{"x", x}, {"y", 3 * x - 1}})}}};
  if (virtual_workers > 0) options.scaling_config.virtual_workers = virtual_workers;
  const auto [code, result] = test::run({storage, {}, options}, loop);
  EXPECT_EQ(code, 0);
  return result && result->checkpoint ? result->checkpoint->to_dict() : StateDict{};
}

TEST(Recompute, TrainsTheSameWeights) {
  const auto storage = test::shared_folder();
  const std::pair<Fuse, int> ways[] = {{Fuse::never, 0}, {Fuse::always, 0}, {Fuse::automatic, 12}};
  for (const auto& [fuse, virtual_workers] : ways) {
    const auto have = trained(storage, true, fuse, virtual_workers),
               want = trained(storage, false, fuse, virtual_workers);
    EXPECT_EQ(have.tensors.size(), want.tensors.size());
    EXPECT_GT(want.tensors.size(), 8u);
    for (const auto& [name, tensor] : want.tensors) {
      // The second stage is a callable, whose statistics are written twice.
      if (name == "model/second.1.running_mean" || name == "model/second.1.running_var" ||
          name == "model/second.1.num_batches_tracked")
        continue;
      EXPECT_TRUE(at::equal(have.tensors.at(name), tensor)) << name << ", " << virtual_workers;
    }
  }
}

}  // namespace
}  // namespace muster::recompute_test
