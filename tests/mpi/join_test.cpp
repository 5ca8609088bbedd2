// Ranks with different numbers of batches in one join scope.
#include "gradients/reducer.hpp"
#include "muster/error.hpp"
#include "muster/optimizer.hpp"
#include "optim/optimizer_step.hpp"
#include "support/prepared.hpp"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace muster::join_test {
namespace {

using test::expect_close;
using test::expect_same_bits_everywhere;
using test::world;
namespace nn = torch::nn;

constexpr double rate = 0.1;

/// Large enough that one gradient counts as large.
nn::Sequential make_net() {
  torch::manual_seed(5);
  return nn::Sequential(nn::Linear(3, 96), nn::BatchNorm1d(96), nn::Linear(96, 96), nn::Linear(96, 2));
}

at::Tensor loss_of(nn::Sequential& net, int rank, int step) {
  const auto x = at::sin(at::arange(15, at::kFloat) * 1.3 + rank * 0.7 + step * 2.1).view({5, 3});
  return at::tanh(net->forward(x)).square().mean();
}

/// The reference: all ranks' batches on one rank; `divisor` 0 divides by the ranks that still have a batch.
nn::Sequential reference(const std::vector<int>& batches, int divisor) {
  auto net = make_net();
  const int last = *std::max_element(batches.begin(), batches.end());
  // Each rank has its own running statistics.
  std::vector<std::vector<at::Tensor>> buffers(batches.size());
  for (auto& own : buffers)
    for (const auto& buffer : net->buffers()) own.push_back(buffer.clone());
  const auto load = [&](const std::vector<at::Tensor>& from) {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < from.size(); ++i) net->buffers()[i].copy_(from[i]);
  };
  std::size_t final_rank = batches.size() - 1;
  for (int step = 0; step < last; ++step) {
    std::vector<at::Tensor> sum;
    int active = 0;
    for (std::size_t r = 0; r < batches.size(); ++r) {
      if (step >= batches[r]) continue;
      ++active;
      final_rank = r;
      load(buffers[r]);
      const auto gradients = torch::autograd::grad({loss_of(net, static_cast<int>(r), step)}, net->parameters());
      for (std::size_t i = 0; i < buffers[r].size(); ++i) buffers[r][i] = net->buffers()[i].clone();
      for (std::size_t i = 0; i < gradients.size(); ++i)
        i < sum.size() ? sum[i] += gradients[i] : (sum.push_back(gradients[i].clone()), sum[i]);
    }
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < sum.size(); ++i)
      net->parameters()[i].sub_(sum[i], rate / (divisor > 0 ? divisor : active));
  }
  load(buffers[final_rank]);
  return net;
}

void expect_equal_models(nn::Sequential& have, nn::Sequential& want) {
  const auto parameters = have->named_parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    expect_close(parameters[i].value(), want->parameters()[i], parameters[i].key());
    expect_same_bits_everywhere(parameters[i].value(), parameters[i].key());
  }
  const auto buffers = have->named_buffers();
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    expect_close(buffers[i].value(), want->buffers()[i], buffers[i].key());
    expect_same_bits_everywhere(buffers[i].value(), buffers[i].key());
  }
}

std::vector<int> of_the_ranks(std::vector<int> numbers) {
  numbers.resize(static_cast<std::size_t>(world().size()));
  return numbers;
}

class Joining : public testing::Test {
 protected:
  void train(int batches) {
    torch::optim::SGD optimizer(net_->parameters(), torch::optim::SGDOptions(rate));
    for (int step = 0; step < batches; ++step) {
      optimizer.zero_grad();
      loss_of(net_, world().rank(), step).backward();
      optimizer.step();
    }
  }

  test::Preparation prepare_;
  nn::Sequential net_ = make_net();
  std::shared_ptr<detail::gradients::PreparedModel> prepared_ = prepare_(net_.ptr());
};

TEST_F(Joining, IsWhatOneRankDoesByHand) {
  for (const auto& numbers : {std::vector{1, 3, 5}, {5, 3, 1}, {0, 2, 2}, {2, 0, 3}, {2, 2, 2}, {0, 0, 0}})
    for (const bool over_all : {false, true}) {
      const auto batches = of_the_ranks(numbers);
      net_ = make_net();
      prepared_ = prepare_(net_.ptr());
      {
        const Join join({prepared_}, {.divide_by_initial_world_size = over_all});
        train(batches[static_cast<std::size_t>(world().rank())]);
      }
      auto want = reference(batches, over_all ? world().size() : 0);
      expect_equal_models(net_, want);
    }
}

/// `passes` backward() before each step, of which the first `unsynchronised` are in no_sync(). Gradients do not depend
/// on the weights, so that of a step is known: of each pass the sum over the ranks that have it, by their number or by
/// all; or, if the program gives weights, of each average the mean over what it counts.
void accumulate_by_hand(bool over_all, int passes, int unsynchronised, bool gives_weights = false) {
  const test::Preparation prepare;
  auto net = nn::Linear(nn::LinearOptions(3, 2));
  const auto prepared = prepare(net.ptr());
  const auto before = net->weight.detach().clone();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(rate));
  const auto gradient = [](int rank, int step, int pass) { return 1.0 + 10 * rank + 3 * step + pass; };
  const auto weight = [](int rank, int step, int pass) { return 50.0 + 400 * rank - 20 * step + 7 * pass; };
  const auto batches = of_the_ranks({1, 3, 2});
  {
    const Join join({prepared}, {.divide_by_initial_world_size = over_all});
    const int rank = world().rank();
    for (int step = 0; step < batches[static_cast<std::size_t>(rank)]; ++step) {
      optimizer.zero_grad();
      for (int pass = 0; pass < passes; ++pass) {
        std::optional<NoSync> scope;
        if (pass < unsynchronised) scope.emplace(prepare.no_sync_depth);
        if (gives_weights) prepare.weight->given = weight(rank, step, pass);
        // The bias is of the first pass alone, so that the others leave its average as it is.
        auto loss = net->weight.sum() * gradient(rank, step, pass);
        if (pass == 0) loss = loss + net->bias.sum() * gradient(rank, step, pass);
        loss.backward();
      }
      optimizer.step();
    }
  }
  double want = 0;
  for (int step = 0; step < 3; ++step) {
    double sum = 0;
    int active = 0;
    for (int rank = 0; rank < world().size(); ++rank) {
      if (step >= batches[static_cast<std::size_t>(rank)]) continue;
      ++active;
      for (int pass = 0; pass < passes; ++pass) sum += gradient(rank, step, pass);
    }
    if (gives_weights) {
      double products = 0, weights = 0;
      for (int pass = 0; pass < passes; ++pass) {
        for (int rank = 0; rank < world().size(); ++rank) {
          if (step >= batches[static_cast<std::size_t>(rank)]) continue;
          products += weight(rank, step, pass) * gradient(rank, step, pass);
          weights += weight(rank, step, pass);
        }
        if (pass >= unsynchronised && weights > 0)
          want -= rate * std::exchange(products, 0) / std::exchange(weights, 0);
      }
    } else if (active > 0) {
      want -= rate * sum / (over_all ? world().size() : active);
    }
  }
  expect_close(net->weight, before + want, "the weight");
}

TEST_F(Joining, SeveralBackwardsBeforeAStepCountOnceEach) {
  for (const bool over_all : {false, true}) {
    accumulate_by_hand(over_all, 2, 0);
    accumulate_by_hand(over_all, 3, 0);
    accumulate_by_hand(over_all, 3, 1);
    accumulate_by_hand(over_all, 3, 1, /*gives_weights=*/true);
  }
}

TEST_F(Joining, FinishIsTheSameAndOnceIsEnough) {
  const auto batches = of_the_ranks({3, 1, 2});
  Join join({prepared_}, {});
  train(batches[static_cast<std::size_t>(world().rank())]);
  join.finish();
  auto want = reference(batches, 0);
  expect_equal_models(net_, want);
  join.finish();
}

TEST_F(Joining, AfterwardsGradientsAreOfAllRanksAgain) {
  for (int round = 0; round < 2; ++round) {
    {
      const Join join({prepared_}, {});
      train(world().rank());
    }
    net_->zero_grad();
    const auto own = torch::autograd::grad({loss_of(net_, world().rank(), 9)}, net_->parameters());
    std::vector<at::Tensor> want;
    for (const auto& gradient : own) want.push_back(test::mean_over_ranks(gradient));
    loss_of(net_, world().rank(), 9).backward();
    for (std::size_t i = 0; i < want.size(); ++i) expect_close(net_->parameters()[i].grad(), want[i], "a gradient");
  }
}

TEST_F(Joining, PassesWithoutAveragingNeedNobody) {
  {
    const Join join({prepared_}, {});
    const NoSync scope(prepare_.no_sync_depth);
    for (int step = 0; step < world().rank(); ++step) loss_of(net_, world().rank(), step).backward();
  }
  for (const auto& p : net_->parameters()) expect_same_bits_everywhere(p, "a parameter");
}

TEST_F(Joining, GradientsMayBeAddedUpOverTwoBatches) {
  const auto batches = of_the_ranks({3, 6, 4});  // the last of three is added up in vain
  {
    const Join join({prepared_}, {});
    torch::optim::SGD optimizer(net_->parameters(), torch::optim::SGDOptions(rate));
    for (int step = 0; step < batches[static_cast<std::size_t>(world().rank())]; ++step) {
      if (step % 2 == 0) {
        optimizer.zero_grad();
        const NoSync scope(prepare_.no_sync_depth);
        loss_of(net_, world().rank(), step).backward();
      } else {
        loss_of(net_, world().rank(), step).backward();
        optimizer.step();
      }
    }
  }
  auto want = make_net();
  for (int step = 1; step < 6; step += 2) {
    at::Tensor loss;
    int active = 0;
    for (int rank = 0; rank < world().size(); ++rank) {
      if (step >= batches[static_cast<std::size_t>(rank)]) continue;
      ++active;
      const auto own = loss_of(want, rank, step - 1) + loss_of(want, rank, step);
      loss = loss.defined() ? loss + own : own;
    }
    if (active == 0) continue;
    const auto gradients = torch::autograd::grad({loss / active}, want->parameters());
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < gradients.size(); ++i) want->parameters()[i].sub_(gradients[i], rate);
  }
  const auto have = net_->named_parameters();
  for (std::size_t i = 0; i < have.size(); ++i) {
    expect_close(have[i].value(), want->parameters()[i], have[i].key());
    expect_same_bits_everywhere(have[i].value(), have[i].key());
  }
}

TEST_F(Joining, WhatRanksHaveAddedUpIsAveragedAtItsEnd) {
  const int batches = 3 + world().rank() % 2;  // some leave after a pass in no_sync()
  {
    const Join join({prepared_}, {});
    for (int step = 0; step < batches; ++step) {
      std::optional<NoSync> scope;
      if (step % 2 == 0) {
        net_->zero_grad();
        scope.emplace(prepare_.no_sync_depth);
      }
      loss_of(net_, world().rank(), step).backward();
    }
  }
  for (const auto& p : net_->parameters()) expect_same_bits_everywhere(p.grad(), "a gradient");
  loss_of(net_, world().rank(), 9).backward();
  for (const auto& p : net_->parameters()) expect_same_bits_everywhere(p.grad(), "a gradient of the pass after it");
}

TEST_F(Joining, AnExceptionEndsTheScopeWithoutAWord) {
  EXPECT_THROW(
      {
        const Join join({prepared_}, {});
        throw std::domain_error("boom");
      },
      std::domain_error);
  EXPECT_FALSE(prepared_->reducer()->is_joined());
  train(1);
}

TEST_F(Joining, APassThatWasAbandonedIsFinishedByTheNextOneOrAtTheEnd) {
  bool boom = true;
  net_->parameters()[0].register_hook([&](const at::Tensor&) {
    if (boom) throw std::domain_error("boom");
  });
  const auto batches = of_the_ranks({0, 2, 1});
  {
    const Join join({prepared_}, {});
    EXPECT_THROW(loss_of(net_, world().rank(), 7).backward(), std::domain_error);
    boom = false;
    train(batches[static_cast<std::size_t>(world().rank())]);
  }
  const auto want = reference(batches, 0)->parameters();
  for (std::size_t i = 0; i < want.size(); ++i) {
    expect_close(net_->parameters()[i], want[i], std::to_string(i));
    expect_same_bits_everywhere(net_->parameters()[i], std::to_string(i));
  }
}

TEST_F(Joining, AnErrorAtItsEndIsRaisedByTheNextBackward) {
  bool boom = world().rank() == 0;
  net_->parameters()[0].register_hook([&](const at::Tensor&) {
    if (std::exchange(boom, false)) throw std::domain_error("boom");
  });
  if (world().rank() == 0) {
    EXPECT_THROW(
        {
          const Join join({prepared_}, {});
          EXPECT_THROW(loss_of(net_, 0, 0).backward(), std::domain_error);
          prepared_->reducer()->finish_abandoned_rounds();
          throw std::domain_error("out of the scope");
        },
        std::domain_error);
  } else {
    { const Join join({prepared_}, {}); }
    EXPECT_THROW(loss_of(net_, world().rank(), 0).backward(), Error);
  }
  EXPECT_FALSE(prepared_->reducer()->is_joined());
  train(1);
  for (const auto& p : net_->parameters()) expect_same_bits_everywhere(p, "a parameter");
}

TEST_F(Joining, SparseGradientsToo) {
  nn::Embedding embedding(nn::EmbeddingOptions(4, 2).sparse(true));
  const auto prepared = prepare_(embedding.ptr());
  torch::optim::SGD optimizer(embedding->parameters(), torch::optim::SGDOptions(1.0));
  auto want = embedding->weight.detach().clone();
  {
    const Join join({prepared}, {});
    for (int step = 0; step <= world().rank(); ++step) {
      optimizer.zero_grad();
      embedding(at::full({1}, step, at::kLong)).sum().backward();
      optimizer.step();
    }
  }
  for (int step = 0; step < world().size(); ++step) want[step] -= 1;  // all that are active have this row
  expect_close(embedding->weight, want, "the embedding");
  expect_same_bits_everywhere(embedding->weight, "the embedding");
}

TEST_F(Joining, RefusesWhatItCannotDo) {
  EXPECT_THROW(Join({}, {}), Error);
  auto other = make_net();
  const auto second = prepare_(other.ptr());
  EXPECT_THROW(Join({prepared_, second}, {}), Error) << "two models";
  {
    const Join join({prepared_}, {});
    EXPECT_THROW(Join({prepared_}, {}), Error) << "one in the other";
  }
  auto partly = make_net();
  auto frozen = partly->parameters()[0];
  frozen.set_requires_grad(false);
  const auto third = prepare_(partly.ptr());
  {
    const Join join({third}, {});
    frozen.set_requires_grad(true);
    EXPECT_THROW(loss_of(partly, world().rank(), 0).backward(), Error) << "a parameter that no pass has trained";
  }
  torch::optim::SGD optimizer(net_->parameters(), torch::optim::SGDOptions(rate));
  {
    const Join join({prepared_}, {});
    const auto step = detail::optim::make_optimizer_step(optimizer, {prepared_}, {.fuse = Fuse::always});
    if (step->fused()) {
      EXPECT_THROW(loss_of(net_, world().rank(), 0).backward(), Error) << "an optimizer fused inside";
    }
  }
  const auto step = detail::optim::make_optimizer_step(optimizer, {prepared_}, {.fuse = Fuse::always});
  if (step->fused()) {
    EXPECT_THROW(Join({prepared_}, {}), Error) << "a fused optimizer";
  }
}

}  // namespace
}  // namespace muster::join_test
