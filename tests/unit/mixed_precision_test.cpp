// The autocast scope, on the CPU.
#include "muster/mixed_precision.hpp"
#include "muster/error.hpp"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <stdexcept>

namespace muster::mixed_precision_test {
namespace {

/// The type in which a linear layer computes now.
at::ScalarType linear_type() { return at::linear(at::ones({2, 3}), at::ones({4, 3}), at::ones({4})).scalar_type(); }

bool enabled() { return at::autocast::is_autocast_enabled(at::kCPU); }

TEST(Autocast, CastsInsideAlone) {
  EXPECT_EQ(linear_type(), at::kFloat);
  {
    const Autocast scope(at::kCPU);
    EXPECT_EQ(linear_type(), at::kBFloat16);
    EXPECT_EQ(at::mse_loss(at::ones({2}, at::kBFloat16), at::ones({2})).scalar_type(), at::kFloat) << "needs the range";
  }
  EXPECT_EQ(linear_type(), at::kFloat);
  {
    const Autocast scope(at::kCPU, {.dtype = at::kHalf});
    EXPECT_EQ(linear_type(), at::kHalf);
  }
  EXPECT_EQ(linear_type(), at::kFloat);
}

TEST(Autocast, LeavesWhatItFound) {
  const auto dtype = at::autocast::get_autocast_dtype(at::kCPU);
  try {
    const Autocast outer(at::kCPU, {.dtype = at::kHalf});
    const Autocast inner(at::kCPU, {.dtype = at::kBFloat16});
    throw std::runtime_error("in the middle");
  } catch (const std::runtime_error&) {
  }
  EXPECT_FALSE(enabled());
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), dtype);
  EXPECT_EQ(at::autocast::increment_nesting(), 1) << "the scopes are counted out";
  at::autocast::decrement_nesting();
}

TEST(Autocast, Nests) {
  const Autocast outer(at::kCPU);
  {
    const Autocast off(at::kCPU, {.enabled = false});
    EXPECT_EQ(linear_type(), at::kFloat);
    const Autocast half(at::kCPU, {.dtype = at::kHalf});
    EXPECT_EQ(linear_type(), at::kHalf);
  }
  EXPECT_EQ(linear_type(), at::kBFloat16);
}

TEST(Autocast, SeesParametersThatTheOptimizerChangedBetween) {
  auto weight = at::ones({1, 1}).requires_grad_();
  const auto forward = [&] {
    const Autocast scope(at::kCPU);
    return at::linear(at::ones({1, 1}), weight).to(at::kFloat);
  };
  forward().sum().backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(weight.grad().item<float>(), 1.0F);
  {
    const at::NoGradGuard no_grad;
    weight.add_(weight.grad());
  }
  EXPECT_EQ(forward().item<float>(), 2.0F);
}

TEST(Autocast, RefusesOtherTypes) {
  try {
    const Autocast scope(at::kCPU, {.dtype = at::kDouble});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
  }
  EXPECT_FALSE(enabled());
}

}  // namespace
}  // namespace muster::mixed_precision_test
