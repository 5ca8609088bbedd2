// prepare_model() gives all ranks the same weights, or throws an error with the reason.
#include "muster/error.hpp"
#include "support/prepared.hpp"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <functional>
#include <optional>

namespace muster::detail::gradients::model_test {
namespace {

using test::Preparation;
using test::values;
using test::world;
namespace nn = torch::nn;

/// The Error that `act` throws.
std::optional<Error> error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

/// All parameters and buffers filled with values of this rank.
template <class M>
M different_everywhere(M module) {
  const at::NoGradGuard no_grad;
  double seed = 1;
  for (auto& p : module->parameters()) p.copy_(values(p.sizes(), seed++));
  for (auto& b : module->buffers()) b.copy_(at::abs(values(b.sizes(), seed++)) * 10);
  return module;
}

std::shared_ptr<nn::SequentialImpl> net() {
  return std::make_shared<nn::SequentialImpl>(nn::Linear(3, 4), nn::BatchNorm1d(4), nn::Linear(4, 2));
}

TEST(Prepare, GivesAllRanksTheConjugatesAndNegativesOfRankZero) {
  const auto conjugate = [](int rank, double seed) {
    const auto numbers = at::arange(4, at::kFloat) + 10 * rank + seed;
    return at::complex(numbers, numbers + 0.5).conj();
  };
  auto module = std::make_shared<nn::Module>();
  auto weight = module->register_parameter("weight", conjugate(world().rank(), 1));
  auto buffer = module->register_buffer("buffer", conjugate(world().rank(), 3));
  auto negative = module->register_buffer("negative", at::imag(conjugate(world().rank(), 5)));
  ASSERT_TRUE(weight.is_conj() && buffer.is_conj() && negative.is_neg());
  const auto prepared = Preparation()(module);
  EXPECT_TRUE(at::equal(weight.detach().resolve_conj(), conjugate(0, 1).resolve_conj()));
  EXPECT_TRUE(at::equal(buffer.resolve_conj(), conjugate(0, 3).resolve_conj()));
  EXPECT_TRUE(at::equal(negative.resolve_neg(), at::imag(conjugate(0, 5)).resolve_neg()));
}

TEST(Prepare, GivesAllRanksTheWeightsAndBuffersOfRankZero) {
  auto module = different_everywhere(net());
  auto before = module->parameters(), buffers = module->buffers();
  torch::optim::SGD optimizer(before, 0.1);
  std::vector<std::string> rank_zero;
  for (auto& t : before) rank_zero.push_back(world().broadcast(c10::str(t)));
  for (auto& t : buffers) rank_zero.push_back(world().broadcast(c10::str(t)));

  const auto prepared = Preparation()(module);
  EXPECT_EQ(prepared->module(), module.get());
  std::size_t at = 0;
  for (auto& t : before) EXPECT_EQ(c10::str(t), rank_zero[at++]) << "in place, so the tensors from before have them";
  for (auto& t : buffers) EXPECT_EQ(c10::str(t), rank_zero[at++]);
  const auto now = module->parameters();
  for (std::size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(now[i].is_same(before[i])) << "the optimizer holds these";
}

TEST(Prepare, CopiesTensorsThatAreNotContiguous) {
  auto module = std::make_shared<nn::Module>();
  module->register_parameter("turned", values({3, 4}, 1).t());
  module->register_buffer("slice", values({4, 4}, 2).slice(1, 0, 4, 2));
  const auto prepared = Preparation()(module);
  test::expect_same_bits_everywhere(module->named_parameters()["turned"], "a transposed parameter");
  test::expect_same_bits_everywhere(module->named_buffers()["slice"], "a strided buffer");
}

TEST(Prepare, GivesExpandedTensorsMemoryOfTheirOwn) {
  auto module = std::make_shared<nn::Module>();
  const auto weight = module->register_parameter("weight", values({1, 3}, 1).expand({4, 3}));
  const auto frozen = module->register_parameter("frozen", values({1}, 2).expand({3}), false);
  const auto mask = module->register_buffer("mask", (values({1, 3}, 3) > 0).expand({2, 3}));
  const auto mean = module->register_buffer("running_mean", values({1}, 4).expand({3}));
  std::vector<std::string> rank_zero;
  for (const auto& t : {weight, frozen, mask, mean}) rank_zero.push_back(world().broadcast(c10::str(t)));
  const auto prepared = Preparation()(module);
  std::size_t at = 0;
  for (const auto& t : {weight, frozen, mask, mean}) {
    EXPECT_EQ(c10::str(t), rank_zero[at++]);
    EXPECT_TRUE(t.is_contiguous()) << at;
  }
  (weight * values({4, 3}, 5)).sum().backward();
  test::expect_close(weight.grad(), test::mean_over_ranks(values({4, 3}, 5)), "weight");
  mean.set_data(at::full({1}, 1.0f + world().rank()).expand({3}));
  prepared->synchronise_buffers();
  test::expect_close(mean, at::full({3}, 0.5 * (1 + world().size())), "running_mean, expanded since");
}

TEST(Prepare, TakesBuffersOfAllTypes) {
  auto module = std::make_shared<nn::Module>();
  for (const auto type : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kUInt16, at::kHalf,
                          at::kBFloat16, at::kDouble, at::kComplexFloat, at::kComplexHalf, at::kFloat8_e4m3fn}) {
    const auto of_type = module->register_module(c10::toString(type), std::make_shared<nn::Module>());
    of_type->register_buffer("values", (values({2, 3}, 1) * 9).abs().to(type));
    if (at::isIntegralType(type, /*includeBool=*/true))
      of_type->register_buffer("running_mean", at::full({2}, world().rank()).to(type));
  }
  const auto prepared = Preparation()(module);
  for (const auto& b : module->named_buffers()) test::expect_same_bits_everywhere(b.value(), b.key());
  for (auto& b : module->buffers()) b.copy_(at::full({1}, world().rank() + 3));
  prepared->synchronise_buffers();
  EXPECT_EQ(module->named_buffers()["Long.running_mean"][0].item<std::int64_t>(), world().rank() + 3)
      << "no statistic of a batch-norm";
}

TEST(Prepare, RefusesAnEmbeddingThatWritesToItsWeightsInForward) {
  for (const bool bag : {false, true}) {
    nn::Sequential module;
    if (bag)
      module->push_back("words", nn::EmbeddingBag(nn::EmbeddingBagOptions(4, 3).max_norm(1.0)));
    else
      module->push_back("words", nn::Embedding(nn::EmbeddingOptions(4, 3).max_norm(1.0)));
    const auto error = error_of([&] { Preparation()(module.ptr()); });
    ASSERT_EQ(error.has_value(), world().size() > 1);
    if (error) {
      EXPECT_NE(std::string(error->what()).find("words"), std::string::npos) << error->what();
    }
  }
}

TEST(Prepare, NamesTheParameterAndTheRanksThatDiffer) {
  const int last = world().size() - 1;
  auto module = std::make_shared<nn::SequentialImpl>(nn::Linear(3, 4), nn::Linear(4, world().rank() == last ? 5 : 2));
  const auto error = error_of([&] { Preparation()(module); });
  if (last == 0) {
    EXPECT_FALSE(error);
    return;
  }
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ExitCode::data);
  const std::string others = last == 1 ? "rank 0" : last == 2 ? "ranks 0, 1" : "ranks 0, 1, 2";
  EXPECT_EQ(std::string(error->what()), "preparing the model: parameter 1.weight is Float[2, 4] on " + others +
                                            " and Float[5, 4] on rank " + std::to_string(last) +
                                            ". Build the same model on every rank");
  const auto texts = world().all_gather(error->what());
  EXPECT_TRUE(std::all_of(texts.begin(), texts.end(), [&](const auto& text) { return text == texts[0]; }));
  for (const auto& p : module->parameters()) EXPECT_FALSE(p.grad().defined());
}

TEST(Prepare, NamesWhatIsMissing) {
  auto module = std::make_shared<nn::Module>();
  module->register_parameter("a", values({2}, 1));
  if (world().rank() != 0) module->register_buffer("extra", values({2}, 1));
  const auto error = error_of([&] { Preparation()(module); });
  ASSERT_EQ(error.has_value(), world().size() > 1);
  if (!error) return;
  EXPECT_NE(std::string(error->what()).find("buffer extra is missing on rank 0 and Float[2] on rank"),
            std::string::npos)
      << error->what();
}

TEST(Prepare, RefusesAModelThatIsPrepared) {
  auto module = net();
  const Preparation prepare;
  auto prepared = prepare(module);
  const auto again = error_of([&] { prepare(module); });
  ASSERT_TRUE(again);
  EXPECT_NE(std::string(again->what()).find("parameter 0.weight is prepared already"), std::string::npos)
      << again->what();
  const auto around = std::make_shared<nn::Module>();
  around->register_module("inner", module);
  EXPECT_TRUE(error_of([&] { prepare(around); })) << "shares parameters with a prepared one";
  prepared.reset();
  EXPECT_FALSE(error_of([&] { prepare(module); })) << "the session that prepared it has ended";
}

TEST(Prepare, OnlyMovesWithoutParallelism) {
  Preparation prepare;
  prepare.options.parallel = Parallel::none;
  auto module = std::make_shared<nn::LinearImpl>(2, world().rank() + 1);
  const auto prepared = prepare(module);
  const auto x = values({3, 2}, 1);
  module->forward(x).sum().backward();
  EXPECT_TRUE(at::allclose(module->weight.grad(), x.sum(0).expand_as(module->weight))) << "this rank's own";
  prepared->synchronise_buffers();
}

TEST(Buffers, StatisticsAreAveragedAndTheRestStaysEachRanksOwn) {
  auto module = net();
  module->register_buffer("seen", at::zeros({2}));
  const auto prepared = Preparation()(module);
  different_everywhere(module);
  auto buffers = module->named_buffers();
  const auto mean = test::mean_over_ranks(buffers["1.running_mean"]);
  const auto var = test::mean_over_ranks(buffers["1.running_var"]);
  buffers["1.num_batches_tracked"].fill_(7 + world().rank());
  const double seen = world().rank() + 0.5;
  buffers["seen"].fill_(seen);
  prepared->synchronise_buffers();
  test::expect_close(buffers["1.running_mean"], mean, "running_mean");
  test::expect_close(buffers["1.running_var"], var, "running_var");
  EXPECT_EQ(buffers["1.num_batches_tracked"].item<int64_t>(), 7);
  EXPECT_EQ(buffers["seen"][0].item<double>(), seen);
  for (const auto& buffer : buffers)
    if (buffer.key() != "seen") test::expect_same_bits_everywhere(buffer.value(), buffer.key());
}

TEST(Buffers, OneThatStandsUnderTwoNamesIsAveragedOnce) {
  auto norm = nn::BatchNorm1d(3);
  auto module = std::make_shared<nn::SequentialImpl>();
  module->push_back("a", norm);
  module->push_back("b", norm);
  const auto prepared = Preparation()(module);
  norm->running_mean.fill_(world().rank() + 1.0);
  const auto mean = test::mean_over_ranks(norm->running_mean);
  prepared->synchronise_buffers();
  test::expect_close(norm->running_mean, mean, "running_mean");
}

TEST(Changed, AHookOfTheUsersIsRefusedBefore) {
  struct Nothing : torch::autograd::PostAccumulateGradHook {
    void operator()(const torch::autograd::Variable&) override {}
  };
  auto module = std::make_shared<nn::LinearImpl>(3, 4);
  torch::autograd::impl::set_post_acc_grad_hooks(module->weight, std::make_unique<Nothing>());
  const auto error = error_of([&] { Preparation()(module); });
  ASSERT_TRUE(error);
  EXPECT_NE(std::string(error->what()).find("weight has a post-accumulate-gradient hook, which muster needs itself"),
            std::string::npos);
}

TEST(Changed, ParametersAreRefusedWithTheirName) {
  const auto refused = [](const std::function<void(nn::SequentialImpl&)>& change, const std::string& fact) {
    auto module = std::make_shared<nn::SequentialImpl>(nn::Linear(3, 4), nn::Linear(4, 2));
    const auto prepared = Preparation()(module);
    change(*module);
    const auto type = module->parameters()[0].scalar_type();
    const auto error = error_of([&] { module->forward(values({5, 3}, 1).to(type)).sum().backward(); });
    ASSERT_TRUE(error) << fact;
    EXPECT_EQ(error->code(), ExitCode::data);
    EXPECT_NE(std::string(error->what()).find(fact), std::string::npos) << error->what();
  };
  refused([](auto& m) { m.to(at::kDouble); },
          "parameter 0.weight was Float[4, 3] on cpu in prepare_model and is Double[4, 3] on cpu now");
  refused(
      [](auto& m) {
        const auto bias = m[1]->template as<nn::Linear>();
        bias->bias.set_data(at::zeros({1}));
      },
      "parameter 1.bias was Float[2] on cpu in prepare_model and is Float[1] on cpu now");
  refused([](auto& m) { m.push_back(nn::Linear(2, 2)); }, "parameter 2.weight was added to the model");
  refused([](auto& m) { m.replace_module("1", nn::Linear(4, 2)); }, "parameter 1.weight was replaced");
  refused([](auto& m) { m.unregister_module("1"); }, "was removed from the model after prepare_model");
}

}  // namespace
}  // namespace muster::detail::gradients::model_test
