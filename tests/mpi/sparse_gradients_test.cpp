// Sparse gradients of embeddings: what backward() leaves in .grad, beside dense ones.
#include "muster/error.hpp"
#include "muster/optimizer.hpp"
#include "optim/optimizer_step.hpp"
#include "support/prepared.hpp"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::gradients::sparse_gradients_test {
namespace {

using test::expect_close;
using test::expect_same_bits_everywhere;
using test::values;
using test::world;
namespace nn = torch::nn;

int rank() { return world().rank(); }
int size() { return world().size(); }

/// Words and pairs of words, both sparse, and a dense layer.
struct NetImpl : nn::Module {
  nn::Embedding words{nullptr};
  nn::EmbeddingBag pairs{nullptr};
  nn::Linear out{nullptr};
  NetImpl() {
    words = register_module("words", nn::Embedding(nn::EmbeddingOptions(20, 3).sparse(true)));
    pairs = register_module("pairs", nn::EmbeddingBag(nn::EmbeddingBagOptions(9, 3).sparse(true).mode(torch::kSum)));
    out = register_module("out", nn::Linear(3, 2));
  }
};
TORCH_MODULE(Net);

class SparseGradients : public testing::Test {
 protected:
  /// Ranks share some words, and have some twice and some alone; rank r has 2 + r of them.
  at::Tensor words() const { return at::arange(2 + rank()) * (1 + rank()) % 7; }
  at::Tensor loss(double seed, bool words_used = true, bool pairs_used = true) {
    auto x = values({4, 3}, seed);
    if (words_used) x = x + net_->words(at::cat({words(), at::full({1}, 5, at::kLong)})).sum(0) * (1 + seed);
    if (pairs_used) x = x + net_->pairs(at::arange(4).view({2, 2}) + rank()).sum(0);
    return at::tanh(net_->out(x)).square().sum();
  }
  void batch(const std::vector<std::int64_t>& samples) {
    auto& weight = *prepare_.weight;
    weight.local = samples.at(static_cast<std::size_t>(rank()));
    weight.global = 0;
    for (int r = 0; r < size(); ++r) weight.global += samples[static_cast<std::size_t>(r)];
  }
  /// The average of the ranks' own gradients, dense and in double precision; zero where there is none.
  std::vector<at::Tensor> together(const at::Tensor& loss) {
    std::vector<at::Tensor> sums;
    const auto parameters = net_->parameters();
    const auto own = torch::autograd::grad({loss}, parameters, {}, std::nullopt, false, true);
    for (std::size_t i = 0; i < own.size(); ++i)
      sums.push_back(test::weighted_sum(own[i].defined() ? own[i].to_dense() : at::zeros_like(parameters[i]),
                                        prepare_.weight->relative() / size()));
    return sums;
  }
  void expect_gradients(const std::vector<at::Tensor>& want) {
    const auto named = net_->named_parameters();
    for (std::size_t i = 0; i < want.size(); ++i) {
      const auto& gradient = named[i].value().grad();
      ASSERT_TRUE(gradient.defined()) << named[i].key();
      EXPECT_EQ(gradient.is_sparse(), named[i].key() != "out.weight" && named[i].key() != "out.bias");
      expect_close(gradient.to_dense(), want[i], named[i].key());
      if (!gradient.is_sparse()) continue;
      EXPECT_TRUE(gradient.is_coalesced());
      expect_same_bits_everywhere(gradient.indices(), named[i].key());
      expect_same_bits_everywhere(gradient.values(), named[i].key());
    }
  }

  test::Preparation prepare_;
  Net net_;
  std::shared_ptr<PreparedModel> prepared_ = prepare_(net_.ptr());
};

TEST_F(SparseGradients, AreTheMean) {
  for (int step = 0; step < 3; ++step) {
    const auto want = together(loss(step));
    net_->zero_grad();
    loss(step).backward();
    expect_gradients(want);
  }
}

TEST_F(SparseGradients, AreWeightedBySamples) {
  for (const auto& samples : {std::vector<std::int64_t>{1, 5, 2}, {4, 0, 3}}) {
    if (size() == 1 && samples[0] == 0) continue;
    batch(samples);
    const auto want = together(loss(1));
    net_->zero_grad();
    loss(1).backward();
    expect_gradients(want);
  }
}

TEST_F(SparseGradients, AddUpWithoutAveragingAndWithIt) {
  for (const bool sync : {false, true}) {
    const auto first = together(loss(1)), second = together(loss(2));
    net_->zero_grad();
    {
      std::optional<NoSync> scope;
      if (!sync) scope.emplace(prepare_.no_sync_depth);
      loss(1).backward();
    }
    loss(2).backward();
    std::vector<at::Tensor> want;
    for (std::size_t i = 0; i < first.size(); ++i) want.push_back(first[i] + second[i]);
    expect_gradients(want);
  }
}

TEST_F(SparseGradients, OfPassesOfWeightZeroLeaveTheAveragesBefore) {
  const auto first = together(loss(1)), second = together(loss(2));
  loss(1).backward();
  prepare_.weight->given = 0;
  {
    const NoSync scope(prepare_.no_sync_depth);
    loss(3).backward();
  }
  prepare_.weight->given = 1;
  loss(2).backward();
  std::vector<at::Tensor> want;
  for (std::size_t i = 0; i < first.size(); ++i) want.push_back(first[i] + second[i]);
  expect_gradients(want);
}

TEST_F(SparseGradients, OfAnEmbeddingThatSomeRanksUse) {
  const bool mine = rank() == size() - 1;
  const auto want = together(loss(1, mine));
  loss(1, mine).backward();
  expect_gradients(want);
}

TEST_F(SparseGradients, OfAnEmbeddingThatNobodyUsesStayAway) {
  loss(1, false).backward();
  EXPECT_FALSE(net_->words->weight.grad().defined());
  EXPECT_TRUE(net_->pairs->weight.grad().defined());
  net_->zero_grad();
  loss(1, false, false).backward();
  EXPECT_FALSE(net_->pairs->weight.grad().defined());
  EXPECT_TRUE(net_->out->weight.grad().defined());
}

TEST_F(SparseGradients, OfAGhostBatchAloneStayAway) {
  if (size() == 1) GTEST_SKIP() << "one rank has all samples";
  batch({0, 2, 2});
  loss(1, rank() == 0).backward();
  EXPECT_FALSE(net_->words->weight.grad().defined());
}

TEST_F(SparseGradients, ZeroedInPlace) {
  loss(1).backward();
  const auto want = together(loss(2));
  net_->zero_grad(/*set_to_none=*/false);
  loss(2).backward();
  expect_gradients(want);
}

TEST_F(SparseGradients, TrainTheSameEmbeddingEverywhere) {
  for (const double limit : {0.0, 0.5}) {
    const OptimizerOptions options{.max_grad_norm = limit, .fuse = Fuse::always};
    torch::optim::SGD plain(net_->parameters(), torch::optim::SGDOptions(0.1));
    auto step = optim::make_optimizer_step(plain, {prepared_}, options);
    PreparedOptimizer<torch::optim::SGD> optimizer(std::move(plain), std::move(step));
    EXPECT_FALSE(optimizer.fused());
    const auto before = net_->words->weight.detach().clone();
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      loss(i).backward();
      optimizer.step();
    }
    EXPECT_FALSE(at::equal(net_->words->weight, before));
    EXPECT_TRUE(at::equal(net_->words->weight[19], before[19])) << "nobody has this word";
    for (const auto& p : net_->named_parameters()) expect_same_bits_everywhere(p.value(), p.key());
  }
}

TEST_F(SparseGradients, AreScaledDownWithTheDenseOnes) {
  constexpr double limit = 0.01;
  torch::optim::SGD plain(net_->parameters(), torch::optim::SGDOptions(1));
  auto step = optim::make_optimizer_step(plain, {prepared_}, {.max_grad_norm = limit});
  PreparedOptimizer<torch::optim::SGD> optimizer(std::move(plain), std::move(step));
  const auto want = together(loss(1));
  double squares = 0;
  for (const auto& gradient : want) squares += gradient.square().sum().item<double>();
  std::vector<at::Tensor> before;
  for (const auto& p : net_->parameters()) before.push_back(p.detach().to(at::kDouble));
  loss(1).backward();
  optimizer.step();
  ASSERT_GT(squares, limit * limit);
  EXPECT_NEAR(optimizer.grad_norm(), std::sqrt(squares), 1e-4);
  const auto named = net_->named_parameters();
  for (std::size_t i = 0; i < want.size(); ++i)
    expect_close(before[i] - named[i].value().detach(), want[i] * (limit / std::sqrt(squares)), named[i].key());
}

TEST_F(SparseGradients, AreAveragedByTheStepAfterPassesWithoutAveraging) {
  // The fused optimizer of the dense ones may step first; then the sparse ones are averaged nonetheless.
  for (const bool fused_first : {true, false}) {
    torch::optim::SGD dense(net_->out->parameters(), torch::optim::SGDOptions(1));
    torch::optim::SGD sparse({net_->words->weight, net_->pairs->weight}, torch::optim::SGDOptions(1));
    auto dense_step = optim::make_optimizer_step(dense, {prepared_}, {.fuse = Fuse::always});
    auto sparse_step = optim::make_optimizer_step(sparse, {prepared_}, {});
    PreparedOptimizer<torch::optim::SGD> of_dense(std::move(dense), std::move(dense_step));
    PreparedOptimizer<torch::optim::SGD> of_sparse(std::move(sparse), std::move(sparse_step));
    const auto want = together(loss(1));
    std::vector<at::Tensor> before;
    for (const auto& p : net_->parameters()) before.push_back(p.detach().to(at::kDouble));
    net_->zero_grad();
    {
      const NoSync scope(prepare_.no_sync_depth);
      loss(1).backward();
    }
    if (fused_first) of_dense.step();
    of_sparse.step();
    if (!fused_first) of_dense.step();
    const auto named = net_->named_parameters();
    for (std::size_t i = 0; i < want.size(); ++i)
      expect_close(before[i] - named[i].value().detach(), want[i], named[i].key());
  }
}

TEST_F(SparseGradients, BesideAFusedOptimizerOfTheDenseOnes) {
  torch::optim::SGD dense(net_->out->parameters(), torch::optim::SGDOptions(0.1));
  auto step = optim::make_optimizer_step(dense, {prepared_}, {.fuse = Fuse::always});
  PreparedOptimizer<torch::optim::SGD> optimizer(std::move(dense), std::move(step));
  torch::optim::SGD sparse({net_->words->weight, net_->pairs->weight}, torch::optim::SGDOptions(0.1));
  for (int i = 0; i < 3; ++i) {
    const auto want = together(loss(i));
    net_->zero_grad();
    loss(i).backward();
    expect_close(net_->words->weight.grad().to_dense(), want[0], "words.weight");
    optimizer.step();
    sparse.step();
  }
  for (const auto& p : net_->named_parameters()) expect_same_bits_everywhere(p.value(), p.key());
}

TEST_F(SparseGradients, AreRefusedByNameWhereTheyAreDense) {
  // The embedding's weight as the matrix of the output layer too.
  try {
    (loss(1) + net_->words->weight.square().sum()).backward();
    FAIL() << "a dense gradient was taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("the gradient of parameter words.weight is dense"), std::string::npos)
        << error.what();
  }
  // And the next one is whole.
  net_->zero_grad();
  const auto want = together(loss(2));
  loss(2).backward();
  expect_gradients(want);
}

TEST_F(SparseGradients, ARankThatGoesOnAfterAnExceptionIsAnErrorOnTheOthers) {
  const auto want = together(loss(2));
  bool boom = rank() == 0;
  net_->words->weight.register_hook([&](const at::Tensor&) {
    if (std::exchange(boom, false)) throw std::domain_error("boom");
  });
  if (rank() == 0)
    EXPECT_THROW(loss(1).backward(), std::domain_error);
  else
    EXPECT_THROW(loss(1).backward(), Error);
  net_->zero_grad();
  loss(2).backward();
  expect_gradients(want);
}

TEST(SparseGradientsOf, SeveralTypesAndAModuleThatIsTheEmbedding) {
  for (const auto type : {at::kDouble, at::kBFloat16}) {
    nn::Embedding embedding(nn::EmbeddingOptions(6, 2).sparse(true));
    embedding->to(type);
    const auto prepared = test::Preparation()(embedding.ptr());
    const auto loss = [&] { return (embedding(at::full({2}, rank() % 2, at::kLong)) * (1 + rank())).sum(); };
    const auto want = test::mean_over_ranks(torch::autograd::grad({loss()}, {embedding->weight})[0].to_dense());
    loss().backward();
    EXPECT_EQ(embedding->weight.grad().scalar_type(), type);
    EXPECT_TRUE(at::allclose(embedding->weight.grad().to_dense().to(at::kDouble), want, 2e-2, 2e-2));
    expect_same_bits_everywhere(embedding->weight.grad().values(), "values");
  }
}

TEST(SparseGradientsOf, OtherModulesAreRefusedByName) {
  auto module = std::make_shared<nn::Module>();
  const auto table = module->register_parameter("table", values({6, 2}, 1));
  const auto prepared = test::Preparation()(module);
  try {
    at::embedding(table, at::arange(3), -1, false, /*sparse=*/true).sum().backward();
    FAIL() << "a sparse gradient was taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("the gradient of parameter table is sparse"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace muster::detail::gradients::sparse_gradients_test
