// The gradient scaler with several ranks, and training in 16 bits.
#include "muster/mixed_precision.hpp"
#include "state/collect.hpp"
#include "support/job.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

namespace muster::mixed_precision_test {
namespace {

using test::line;
using test::run;
using test::world;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// One parameter of two elements under SGD with rate 1.
struct Fixture {
  at::Tensor parameter = at::zeros({2}).requires_grad_();
  torch::optim::SGD optimizer{std::vector<at::Tensor>{parameter}, 1.0};

  void give(float gradient) { parameter.mutable_grad() = at::full({2}, gradient); }
  float value() const { return parameter[0].item<float>(); }
};

bool last_rank() { return world().rank() == world().size() - 1; }

ExitCode refused(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.code();
  }
  return ExitCode::done;
}

TEST(Autocast, ScopesOfOtherTypesNest) {
  const torch::nn::Linear net(4, 4);
  const auto x = at::ones({2, 4});
  const Autocast outer(at::kCPU, {.dtype = at::kBFloat16});
  EXPECT_EQ(torch::nn::Linear(net)->forward(x).scalar_type(), at::kBFloat16);
  {
    const Autocast inner(at::kCPU, {.dtype = at::kHalf});
    EXPECT_EQ(torch::nn::Linear(net)->forward(x).scalar_type(), at::kHalf);
  }
  EXPECT_EQ(torch::nn::Linear(net)->forward(x).scalar_type(), at::kBFloat16);
}

TEST(GradScaler, FollowsTorchsArithmetic) {
  GradScaler scaler(world().duplicate(), at::kCPU, {.init_scale = 1024, .growth_interval = 3});
  // The values of torch.amp.GradScaler after each update(), with the same settings and gradients.
  struct Step {
    float gradient;
    bool steps;
    double scale;
  };
  const std::vector<Step> script{{1, true, 1024},    {1, true, 1024},   {1, true, 2048},    {1, true, 2048},
                                 {inf, false, 1024}, {nan, false, 512}, {1, true, 512},     {1, true, 512},
                                 {1, true, 1024},    {1, true, 1024},   {-inf, false, 512}, {1, true, 512},
                                 {1, true, 512},     {1, true, 1024}};
  Fixture one;
  float want = 0;
  for (std::size_t i = 0; i < script.size(); ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    const auto scaled = scaler.scale(at::ones({}));
    EXPECT_EQ(scaled.item<double>(), scaler.get_scale());
    one.give(script[i].gradient * static_cast<float>(scaler.get_scale()));
    EXPECT_EQ(scaler.step(one.optimizer), script[i].steps);
    want -= script[i].steps ? 1 : 0;
    EXPECT_EQ(one.value(), want);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), script[i].scale);
  }
  scaler.update(3.0);
  EXPECT_EQ(scaler.get_scale(), 3.0);
}

TEST(GradScaler, OneRanksInfinityKeepsAllFromStepping) {
  GradScaler scaler(world().duplicate(), at::kCPU);
  Fixture one;
  one.give(last_rank() ? inf : 65536.0F);
  EXPECT_FALSE(scaler.step(one.optimizer));
  EXPECT_EQ(one.value(), 0.0F);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 32768);
  one.give(32768);
  EXPECT_TRUE(scaler.step(one.optimizer));
  EXPECT_EQ(one.value(), -1.0F);
}

TEST(GradScaler, UnscalesBeforeClipping) {
  GradScaler scaler(world().duplicate(), at::kCPU, {.init_scale = 8});
  Fixture one;
  one.give(8 * 3.0F);
  scaler.unscale_(one.optimizer);
  EXPECT_EQ(one.parameter.grad()[1].item<float>(), 3.0F);
  torch::nn::utils::clip_grad_norm_(one.parameter, std::sqrt(2.0));
  EXPECT_TRUE(scaler.step(one.optimizer));
  EXPECT_NEAR(one.value(), -1.0, 1e-5) << "unscaled once";
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 8);
}

TEST(GradScaler, UnscalesAWeightThatIsListedTwiceOnce) {
  GradScaler scaler(world().duplicate(), at::kCPU, {.init_scale = 8});
  Fixture one;
  one.optimizer.param_groups()[0].params().push_back(one.parameter);
  one.give(8 * 3.0F);
  scaler.unscale_(one.optimizer);
  EXPECT_EQ(one.parameter.grad()[0].item<float>(), 3.0F);
}

TEST(GradScaler, TakesGradientsAsTheyAre) {
  GradScaler scaler(world().duplicate(), at::kCPU, {.init_scale = 4});
  std::vector<at::Tensor> parameters{at::zeros({2}).requires_grad_(), at::zeros({2}, at::kDouble).requires_grad_(),
                                     at::zeros({2}, at::kBFloat16).requires_grad_(), at::zeros({2}).requires_grad_()};
  torch::optim::SGD optimizer(parameters, 1.0);
  for (std::size_t i = 0; i < 3; ++i) parameters[i].mutable_grad() = at::full_like(parameters[i], 4);
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(parameters[i][1].item<float>(), -1.0F) << i;
  EXPECT_FALSE(parameters[3].grad().defined());
  EXPECT_EQ(parameters[3][0].item<float>(), 0.0F);
  parameters[1].mutable_grad() = at::full_like(parameters[1], nan);
  EXPECT_FALSE(scaler.step(optimizer));

  GradScaler strict(world().duplicate(), at::kCPU);
  const auto half = at::zeros({2}, at::kHalf).requires_grad_();
  half.mutable_grad() = at::ones({2}, at::kHalf);
  torch::optim::SGD in_half(std::vector<at::Tensor>{half}, 1.0);
  EXPECT_EQ(refused([&] { strict.step(in_half); }), ExitCode::user_error);
  const auto complex = at::zeros({2}, at::kComplexFloat).requires_grad_();
  complex.mutable_grad() = at::ones({2}, at::kComplexFloat);
  torch::optim::SGD of_complex(std::vector<at::Tensor>{complex}, 1.0);
  strict.update(2);
  EXPECT_EQ(refused([&] { strict.step(of_complex); }), ExitCode::user_error);
}

TEST(GradScaler, ARankMayHaveNoGradientAtAll) {
  GradScaler scaler(world().duplicate(), at::kCPU, {.init_scale = 2});
  Fixture one;
  const bool others = world().size() > 1;
  if (!last_rank()) one.give(inf);
  EXPECT_EQ(scaler.step(one.optimizer), !others);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), others ? 1 : 2);
}

TEST(GradScaler, KeepsOptimizersApart) {
  GradScaler scaler(world().duplicate(), at::kCPU, {.init_scale = 16});
  Fixture one, other;
  one.give(last_rank() ? nan : 16.0F);
  other.give(16);
  scaler.unscale_(one.optimizer);
  scaler.unscale_(other.optimizer);
  EXPECT_TRUE(scaler.step(other.optimizer));
  EXPECT_FALSE(scaler.step(one.optimizer));
  EXPECT_EQ(one.value(), 0.0F);
  EXPECT_EQ(other.value(), -1.0F);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 8);
}

TEST(GradScaler, RefusesCallsOutOfOrder) {
  GradScaler scaler(world().duplicate(), at::kCPU);
  Fixture one;
  EXPECT_EQ(refused([&] { scaler.update(); }), ExitCode::user_error);
  one.give(65536);
  scaler.unscale_(one.optimizer);
  EXPECT_EQ(refused([&] { scaler.unscale_(one.optimizer); }), ExitCode::user_error);
  EXPECT_TRUE(scaler.step(one.optimizer));
  EXPECT_EQ(refused([&] { scaler.step(one.optimizer); }), ExitCode::user_error);
  EXPECT_EQ(refused([&] { scaler.unscale_(one.optimizer); }), ExitCode::user_error);
  EXPECT_EQ(one.value(), -1.0F);
  scaler.update();
  one.give(65536);
  EXPECT_TRUE(scaler.step(one.optimizer));

  for (const double bad : {std::nan(""), static_cast<double>(INFINITY), -1.0, 0.0, 1e300})
    EXPECT_EQ(refused([&] { scaler.update(bad); }), ExitCode::user_error) << bad;
  for (const GradScalerOptions& bad :
       {GradScalerOptions{.init_scale = 0}, GradScalerOptions{.init_scale = INFINITY},
        GradScalerOptions{.growth_factor = 1}, GradScalerOptions{.growth_factor = INFINITY},
        GradScalerOptions{.growth_factor = std::nan("")}, GradScalerOptions{.backoff_factor = 1},
        GradScalerOptions{.growth_interval = 0}})
    EXPECT_EQ(refused([&] { GradScaler(world(), at::kCPU, bad); }), ExitCode::usage);
}

TEST(GradScaler, DisabledItOnlySteps) {
  GradScaler scaler(world().duplicate(), at::kCPU, {.enabled = false});
  Fixture one;
  EXPECT_EQ(scaler.scale(at::full({}, 3.0)).item<double>(), 3.0);
  one.give(1);
  scaler.unscale_(one.optimizer);
  EXPECT_TRUE(scaler.step(one.optimizer));
  scaler.update();
  EXPECT_EQ(one.value(), -1.0F);
  EXPECT_EQ(scaler.get_scale(), 1.0);
}

TEST(GradScaler, GoesOnWhereItWasSaved) {
  const auto make = [] {
    return std::make_unique<GradScaler>(world().duplicate(), at::kCPU,
                                        GradScalerOptions{.init_scale = 64, .growth_interval = 4});
  };
  Fixture one;
  const auto step = [&](GradScaler& scaler, float gradient) {
    one.give(gradient * static_cast<float>(scaler.get_scale()));
    scaler.step(one.optimizer);
    scaler.update();
    return scaler.get_scale();
  };
  const auto straight = make();
  for (const float gradient : {1.0F, inf, 1.0F, 1.0F, 1.0F}) step(*straight, gradient);
  const auto saved = detail::state::collect({{"scaler", *straight}});
  const auto resumed = std::make_unique<GradScaler>(world().duplicate(), at::kCPU);
  detail::state::restore({{"scaler", *resumed}}, saved);
  EXPECT_EQ(resumed->get_scale(), 32);
  for (const float gradient : {1.0F, 1.0F, nan, 1.0F, 1.0F, 1.0F, 1.0F})
    EXPECT_EQ(step(*resumed, gradient), step(*straight, gradient));
  EXPECT_EQ(resumed->get_scale(), 64);

  GradScaler other(world().duplicate(), at::kCPU, {.enabled = false});
  const auto none = detail::state::collect({{"scaler", other}});
  EXPECT_EQ(refused([&] { detail::state::restore({{"scaler", *resumed}}, none); }), ExitCode::data);
  auto damaged = saved;
  damaged.values.at("scaler")["growth_factor"] = "two";
  EXPECT_EQ(refused([&] { detail::state::restore({{"scaler", *resumed}}, damaged); }), ExitCode::data);
  detail::state::restore({{"scaler", other}}, saved);
  EXPECT_FALSE(other.is_enabled());
}

/// Trains with or without 16 bits and returns the mean loss of the last epoch.
double fit(const std::string& name, std::optional<at::ScalarType> dtype) {
  const TorchTrainerOptions options{.run_config = {.name = name}, .datasets = {{"train", line()}}};
  const auto [code, result] = run({test::shared_folder(), {}, options}, [&](Session& session, const Config&) {
    auto net = session.prepare_model(
        torch::nn::Sequential(torch::nn::Linear(1, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1)));
    torch::optim::Adam optimizer(net->parameters(), 0.02);
    auto scaler = session.grad_scaler({.growth_interval = 50, .enabled = dtype == at::kHalf});
    auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"scaler", scaler}});
    auto shard = session.get_dataset_shard("train");
    for ([[maybe_unused]] auto epoch : session.epochs(25)) {
      Mean mean;
      for (auto& batch : shard.iter_torch_batches({.batch_size = 4, .shuffle = true})) {
        optimizer.zero_grad();
        at::Tensor loss;
        {
          auto scope = session.autocast({.dtype = dtype.value_or(at::kBFloat16), .enabled = dtype.has_value()});
          const auto output = net->forward(batch["x"]);
          EXPECT_EQ(output.scalar_type(), dtype.value_or(at::kFloat));
          loss = torch::mse_loss(output, batch["y"]);
        }
        EXPECT_EQ(loss.scalar_type(), at::kFloat);
        scaler.scale(loss).backward();
        scaler.step(optimizer);
        scaler.update();
        mean.add(loss, batch.size());
      }
      session.report({{"loss", mean}, {"scale", scaler.get_scale()}}, state);
    }
    for (const auto& parameter : net->parameters()) EXPECT_EQ(parameter.scalar_type(), at::kFloat);
  });
  EXPECT_EQ(code, 0);
  return result ? result->metrics.at("loss").get<double>() : inf;
}

TEST(MixedPrecision, TrainsAboutAsWell) {
  const double full = fit("float", std::nullopt);
  EXPECT_LT(full, 0.05);
  EXPECT_NEAR(fit("bfloat16", at::kBFloat16), full, 0.01);
  EXPECT_NEAR(fit("half", at::kHalf), full, 0.01);
}

}  // namespace
}  // namespace muster::mixed_precision_test
