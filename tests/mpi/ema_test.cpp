// Averages of weights: the formula, the same on every rank, with any optimizer, and nothing else changes.
#include "muster/ema.hpp"
#include "muster/error.hpp"
#include "muster/schedulers.hpp"
#include "optim/optimizer_step.hpp"
#include "state/collect.hpp"
#include "support/job.hpp"
#include "support/prepared.hpp"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace muster::ema_test {
namespace {

namespace nn = torch::nn;
using test::expect_same_bits_everywhere;
using test::values;
using test::world;

/// One large weight, so that memory of several pages is fused; statistics, and a weight under two names.
struct NetImpl : nn::Module {
  nn::Linear in{nullptr}, middle{nullptr}, out{nullptr};
  nn::BatchNorm1d norm{nullptr};
  NetImpl() {
    in = register_module("in", nn::Linear(3, 96));
    middle = register_module("middle", nn::Linear(96, 96));
    norm = register_module("norm", nn::BatchNorm1d(96));
    out = register_module("out", nn::Linear(96, 2));
    const at::NoGradGuard no_grad;
    double seed = 0;
    for (auto& p : parameters()) p.copy_(at::sin(at::arange(p.numel()) * 0.37 + ++seed).view(p.sizes()) * 0.1);
  }
  at::Tensor forward(const at::Tensor& x) { return out(norm(at::tanh(middle(at::tanh(in(x)))))); }
};
TORCH_MODULE(Net);

using Named = std::map<std::string, at::Tensor>;

Named copies_of(nn::Module& module) {
  Named named;
  for (const auto& item : module.named_parameters()) named.emplace(item.key(), item.value().detach().clone());
  return named;
}

void expect_equal(const Named& have, const Named& want, const std::string& what) {
  ASSERT_EQ(have.size(), want.size()) << what;
  for (const auto& [name, tensor] : want) EXPECT_TRUE(at::equal(have.at(name), tensor)) << what << ", " << name;
}

/// The averages, read from a module that has them in place of its weights.
Named averages_of(const EMA& ema, nn::Module& module) {
  const auto scope = ema.apply();
  return copies_of(module);
}

/// A model, its optimizer, and memory of which a save would take a snapshot.
struct Training {
  Net net;
  test::Preparation prepare;
  std::shared_ptr<detail::gradients::PreparedModel> prepared = prepare(net.ptr());
  std::shared_ptr<detail::optim::SnapshotSources> snapshot_sources = std::make_shared<detail::optim::SnapshotSources>();
  std::unique_ptr<PreparedOptimizer<torch::optim::Adam>> optimizer;

  explicit Training(Fuse fuse) {
    torch::optim::Adam own(net->parameters(), torch::optim::AdamOptions(1e-2));
    auto step =
        detail::optim::make_optimizer_step(own, {prepared}, {.fuse = fuse}, {.snapshot_sources = snapshot_sources});
    optimizer = std::make_unique<PreparedOptimizer<torch::optim::Adam>>(std::move(own), std::move(step));
  }
  void backward(int step) {
    optimizer->zero_grad();
    net->forward(values({5, 3}, step)).sub(values({5, 2}, step + 0.5)).square().mean().backward();
  }
  void step(int number) {
    backward(number);
    optimizer->step();
  }
};

TEST(EMA, IsTheFormulaUnderAnyOptimizer) {
  for (const auto fuse : {Fuse::always, Fuse::never})
    for (const bool warmup : {false, true}) {
      Training training(fuse);
      EMA ema(training.net, {.decay = 0.9, .warmup = warmup});
      Named want = copies_of(*training.net);
      expect_equal(averages_of(ema, *training.net), want, "before the first update");
      for (int step = 0; step < 20; ++step) {
        training.step(step);
        ema.update();
        const double decay = warmup ? std::min(0.9, (1.0 + step) / (10.0 + step)) : 0.9;
        for (const auto& [name, weight] : copies_of(*training.net))
          want[name] = step == 0 ? weight : want.at(name).lerp(weight, 1 - decay);
      }
      EXPECT_EQ(ema.updates(), 20);
      const auto have = averages_of(ema, *training.net);
      expect_equal(have, want, warmup ? "with warm-up" : "without");
      for (const auto& [name, tensor] : have) expect_same_bits_everywhere(tensor, name);
    }
}

TEST(EMA, AScopeLeavesTrainingAsItIs) {
  for (const auto fuse : {Fuse::always, Fuse::never}) {
    Training looking(fuse), straight(fuse);
    EMA ema(looking.net, {.decay = 0.5});
    for (int step = 0; step < 12; ++step) {
      looking.step(step);
      straight.step(step);
      ema.update();
      const auto own = copies_of(*looking.net);
      const auto* const memory = looking.net->middle->weight.const_data_ptr();
      if (step % 3 == 0)  // as a save behind training does
        for (auto* training : {&looking, &straight})
          for (auto* one : *training->snapshot_sources) one->take_snapshot();
      try {
        const auto scope = ema.apply();
        EXPECT_EQ(at::equal(looking.net->middle->weight, own.at("middle.weight")), step == 0);
        const at::NoGradGuard no_grad;
        looking.net->eval();
        looking.net->forward(values({5, 3}, 1));
        looking.net->train();
        if (step % 2 == 0) throw std::runtime_error("in the middle");
      } catch (const std::runtime_error&) {
      }
      expect_equal(copies_of(*looking.net), own, "after the scope");
      EXPECT_EQ(looking.net->middle->weight.const_data_ptr(), memory) << "nothing was copied";
    }
    // Between backward() and step() too.
    looking.backward(12);
    straight.backward(12);
    { const auto scope = ema.apply(); }
    looking.optimizer->step();
    straight.optimizer->step();
    EXPECT_EQ(looking.optimizer->fused(), fuse == Fuse::always && world().size() > 1);
    expect_equal(copies_of(*looking.net), copies_of(*straight.net), "at the end");
  }
}

TEST(EMA, IsThatOfTheWeightsAndNotOfTheStatistics) {
  Net net;
  EMA ema(net, {.decay = 0.5});
  ema.update();
  net->norm->running_mean.fill_(3);
  ema.update();
  const auto scope = ema.apply();
  EXPECT_EQ(net->norm->running_mean[0].item<float>(), 3);
}

TEST(EMA, OfSixteenBitsIsKeptInFloat) {
  nn::Linear net(2, 1);
  net->to(at::kBFloat16);
  const at::NoGradGuard no_grad;
  for (auto& p : net->parameters()) p.fill_(1);
  EMA ema(net, {.decay = 0.999});
  ema.update();
  for (auto& p : net->parameters()) p.fill_(2);
  for (int i = 0; i < 700; ++i) ema.update();
  {
    const auto scope = ema.apply();
    EXPECT_EQ(net->weight.scalar_type(), at::kBFloat16);
    EXPECT_NEAR(net->weight[0][0].item<float>(), 1.5, 0.02) << "a step of 0.001 is below bfloat16's";
  }
  EXPECT_EQ(net->weight[0][0].item<float>(), 2);
}

TEST(EMA, OfWholeNumbersIsTheirLastValue) {
  auto net = std::make_shared<nn::Module>();
  const auto count = net->register_parameter("count", at::zeros({2}, at::kLong), /*requires_grad=*/false);
  const auto weight = net->register_parameter("weight", at::zeros({2}, at::kComplexDouble));
  EMA ema(net, {.decay = 0.5});
  const at::NoGradGuard no_grad;
  for (const int value : {0, 4}) {
    count.fill_(value);
    weight.fill_(value);
    ema.update();
  }
  count.fill_(9);
  const auto scope = ema.apply();
  EXPECT_TRUE(at::equal(count, at::full({2}, 4, at::kLong)));
  EXPECT_TRUE(at::equal(weight, at::full({2}, 2, at::kComplexDouble)));
}

TEST(EMA, OfAWeightUnderTwoNamesIsOne) {
  auto net = std::make_shared<nn::Module>();
  auto first = nn::Linear(4, 4);
  net->register_module("a", first.ptr());
  net->register_module("b", first.ptr());
  EMA ema(net, {.decay = 0.5});
  const at::NoGradGuard no_grad;
  ema.update();
  const auto before = first->weight.clone();
  first->weight.add_(1);
  ema.update();
  const auto state = detail::state::collect({{"ema", ema}});
  EXPECT_TRUE(at::allclose(state.tensors.at("ema/a.weight"), before + 0.5));
  EXPECT_EQ(state.tensors.at("ema/a.weight").const_data_ptr(), state.tensors.at("ema/b.weight").const_data_ptr());
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(EMA, OfSixteenBitsIsLoadedIntoItsModel) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    nn::BatchNorm1d norm(3);
    norm->to(type);
    EMA ema(norm, {.decay = 0.5});
    ema.update();
    {
      const at::NoGradGuard no_grad;
      norm->weight.add_(1);
    }
    ema.update();
    norm->running_mean.fill_(0.25);
    const auto checkpoint = Checkpoint::from_dict({{"ema", ema}, {"other", norm}});
    nn::BatchNorm1d loaded(3);
    loaded->to(type);
    checkpoint.load("ema", loaded);
    EXPECT_TRUE(at::equal(loaded->weight, at::full({3}, 1.5, type)));
    EXPECT_TRUE(at::equal(loaded->running_mean, norm->running_mean));
    // What is no average must have the model's own type.
    nn::BatchNorm1d wide(3);
    EXPECT_SAYS(refusal([&] { checkpoint.load("other", wide); }), "weight: type");
    const auto without_updates = Checkpoint::from_dict({{"ema", wide}});
    EXPECT_SAYS(refusal([&] { without_updates.load("ema", loaded); }), "weight: type");
  }
}

TEST(EMA, RefusesWhatWouldMixUpWeightsAndAverages) {
  Net net;
  for (const double decay : {-0.1, 1.1, std::nan("")})
    EXPECT_SAYS(refusal([&] { EMA(net, {.decay = decay}); }), "decay");
  EMA ema(net);
  ema.update();
  const auto saved = detail::state::collect({{"ema", ema}});
  {
    const auto scope = ema.apply();
    EXPECT_SAYS(refusal([&] { ema.update(); }), "End the scope of EMA::apply()");
    EXPECT_SAYS(refusal([&] { const auto other = ema.apply(); }), "End the scope of EMA::apply()");
    EXPECT_SAYS(refusal([&] { detail::state::collect({{"ema", ema}}); }), "End the scope of EMA::apply()");
    EXPECT_SAYS(refusal([&] { detail::state::restore({{"ema", ema}}, saved); }), "is alive");
  }
  ema.update();
  auto wrong = saved;
  wrong.tensors.erase("ema/in.weight");
  wrong.tensors["ema/more"] = at::zeros({1});
  wrong.tensors["ema/out.bias"] = at::zeros({3});
  wrong.values["ema"] = {{"updates", -1}};
  const auto text = refusal([&] { detail::state::restore({{"ema", ema}}, wrong); });
  for (const char* part : {"in.weight: not in", "more: in the checkpoint", "out.bias: shape", "something else"})
    EXPECT_SAYS(text, part);
  EXPECT_EQ(ema.updates(), 2);
}

/// A run of 2 epochs that reports "average", a number computed from the averaged weights, after each.
std::pair<int, std::optional<Result>> train(const std::filesystem::path& storage, const std::string& name, Fuse fuse,
                                            bool async, const std::function<void(Session&, const EMA&)>& at_end) {
  const TorchTrainerOptions options{.run_config = {.name = name, .checkpoint_config = {.async_save = async}},
                                    .datasets = {{"train", test::line()}}};
  return test::run({storage, {}, options}, [&](Session& session, const Config&) {
    struct Small : nn::Module {
      nn::Linear in = register_module("in", nn::Linear(1, 64)), out = register_module("out", nn::Linear(64, 1));
      nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(64));
      at::Tensor forward(const at::Tensor& x) { return out(norm(at::tanh(in(x)))); }
    };
    auto net = std::make_shared<Small>();
    EMA ema(net, {.decay = 0.9});  // of what each rank begins with; prepare_model makes it rank 0's
    net = session.prepare_model(net);
    auto optimizer = session.prepare_optimizer(
        torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)), {.fuse = fuse});
    OneCycle scheduler(optimizer, {.max_lr = 0.003, .total_steps = 40});
    auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"scheduler", scheduler}, {"ema", ema}});
    state.restore();
    const auto shard = session.get_dataset_shard();
    for ([[maybe_unused]] auto epoch : session.epochs(3)) {
      for (auto& batch : shard.iter_torch_batches({.batch_size = 4, .shuffle = true})) {
        optimizer.zero_grad();
        torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
        optimizer.step();
        scheduler.step();
        ema.update();
      }
      double average = 0;
      {
        const auto scope = ema.apply();
        const auto evaluation = session.evaluation(net);
        average = net->forward(at::ones({1, 1})).item<double>() + net->in->weight.sum().item<double>();
      }
      for (const auto& [path, tensor] : averages_of(ema, *net)) expect_same_bits_everywhere(tensor, path);
      session.report({{"average", average}, {"lr", scheduler.get_last_lr()[0]}}, state);
      if (at_end) at_end(session, ema);
    }
    const auto checkpoint = session.get_checkpoint();
    ASSERT_TRUE(checkpoint);
    auto loaded = std::make_shared<Small>();
    checkpoint->load("ema", loaded);  // under the model's names, its statistics too
    const auto scope = ema.apply();
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(at::equal(loaded->named_parameters()[item.key()], item.value())) << item.key();
    for (const auto& item : net->named_buffers())
      EXPECT_TRUE(at::equal(loaded->named_buffers()[item.key()], item.value())) << item.key();
  });
}

TEST(EMA, IsPartOfARun) {
  const auto storage = test::shared_folder();
  for (const auto& [fuse, async] : {std::pair(Fuse::never, false), {Fuse::always, false}, {Fuse::always, true}}) {
    const auto way = std::to_string(static_cast<int>(fuse)) + (async ? "a" : "");
    const auto [straight_code, straight] = train(storage, "straight" + way, fuse, async, {});
    ASSERT_EQ(straight_code, 0) << (straight->error ? straight->error->what() : "");
    const auto stop = [](Session&, const EMA&) { throw std::runtime_error("stopped here"); };
    for (int epoch = 0; epoch < 2; ++epoch) EXPECT_EQ(train(storage, "resumed" + way, fuse, async, stop).first, 1);
    const auto [code, resumed] = train(storage, "resumed" + way, fuse, async, {});
    ASSERT_EQ(code, 0) << (resumed->error ? resumed->error->what() : "");
    ASSERT_EQ(resumed->metrics_history.size(), 3u);
    for (std::size_t row = 0; row < 3; ++row)
      for (const char* key : {"average", "lr"}) {
        EXPECT_TRUE(straight->metrics_history[row].at(key).is_number()) << "training came to nothing";
        EXPECT_EQ(resumed->metrics_history[row].at(key), straight->metrics_history[row].at(key)) << key << row;
      }
  }
}

TEST(EMA, WithVirtualWorkersOneOfAnUnpreparedModelIsUpdatedOncePerStepToo) {
  const auto storage = test::shared_folder();
  const TorchTrainerOptions options{.scaling_config = {.virtual_workers = 2 * world().size()},
                                    .run_config = {.name = "unprepared"},
                                    .datasets = {{"train", test::line()}}};
  const auto [code, result] = test::run({storage, {}, options}, [&](Session& session, const Config&) {
    nn::Linear own(1, 1), teacher(1, 1);
    auto net = session.prepare_model(own);
    EMA ema(net), of_teacher(teacher);
    std::int64_t steps = 0;
    for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 2})) {
      torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
      ema.update();
      of_teacher.update();
      steps += session.is_step_complete();
      EXPECT_EQ(ema.updates(), steps);
      EXPECT_EQ(of_teacher.updates(), steps);
    }
    EXPECT_EQ(steps, session.global_step());
    of_teacher.update();
    EXPECT_EQ(of_teacher.updates(), steps + 1) << "outside of steps";
  });
  EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
}

TEST(EMA, AReportInsideItsScopeSavesNothing) {
  const auto storage = test::shared_folder();
  const TorchTrainerOptions options{.run_config = {.name = "inside"}};
  const auto [code, result] = test::run({storage, {}, options}, [&](Session& session, const Config&) {
    auto net = session.prepare_model(nn::Linear(2, 1));
    EMA ema(net);
    auto state = session.state({{"model", net}, {"ema", ema}});
    const auto scope = ema.apply();
    session.report({{"a", 1}}, state);
  });
  EXPECT_EQ(code, 1);
  EXPECT_SAYS(std::string(result->error ? result->error->what() : "no error"), "End the scope of EMA::apply()");
  EXPECT_FALSE(result->checkpoint);
}

void fill(nn::Module& module, double value) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.fill_(value);
}

TEST(EMA, AveragesAreNotSavedAsTheModelsWeights) {
  const auto storage = test::shared_folder();
  const TorchTrainerOptions options{.run_config = {.name = "model_alone"}};
  const auto [code, result] = test::run({storage, {}, options}, [&](Session& session, const Config&) {
    auto net = session.prepare_model(nn::Linear(2, 1));
    EMA ema(net, {.decay = 0.5});
    for (const double value : {1, 3}) {
      fill(*net, value);
      ema.update();
    }
    auto state = session.state({{"model", net}});  // the average is none of its entries
    session.report({}, state);
    const auto scope = ema.apply();
    const auto averaged = Checkpoint::from_dict({{"model", net}}).to_dict();  // who asks for them gets them
    EXPECT_TRUE(at::equal(averaged.tensors.at("model/weight"), at::full({1, 2}, 2.0)));
    session.report({}, state);
  });
  EXPECT_EQ(code, 1);
  const std::string error = result->error ? result->error->what() : "no error";
  EXPECT_SAYS(error, "saving model/");
  EXPECT_SAYS(error, "End the scope of EMA::apply()");
  ASSERT_TRUE(result->checkpoint);
  EXPECT_TRUE(at::equal(result->checkpoint->to_dict().tensors.at("model/weight"), at::full({1, 2}, 3.0)));
}

TEST(EMA, NothingIsLoadedInTheirPlace) {
  nn::Linear net(2, 1), saved(2, 1);
  fill(*saved, 9);
  const auto checkpoint = Checkpoint::from_dict({{"model", saved}, {"weight", saved->weight}});
  EMA ema(net, {.decay = 0.5});
  for (const double value : {1, 3}) {
    fill(*net, value);
    ema.update();
  }
  {
    const auto scope = ema.apply();
    EXPECT_SAYS(refusal([&] { checkpoint.load("model", net); }), "is alive");
    EXPECT_SAYS(refusal([&] { checkpoint.load("weight", net->weight); }), "is alive");
    EXPECT_EQ(net->bias.item<float>(), 2) << "the average";
  }
  EXPECT_EQ(net->bias.item<float>(), 3);
  checkpoint.load("model", net);
  EXPECT_EQ(net->bias.item<float>(), 9);
}

TEST(EMA, AnotherOfTheSameWeightsWaitsToo) {
  nn::Linear net(2, 1);
  EMA slow(net, {.decay = 0.75}), fast(net, {.decay = 0.5});
  for (const double value : {0, 8}) {
    fill(*net, value);
    slow.update();
    fast.update();
  }
  EMA fresh(net);
  {
    const auto scope = slow.apply();
    EXPECT_EQ(net->bias.item<float>(), 2);
    EXPECT_SAYS(refusal([&] { fast.update(); }), "End the scope of EMA::apply()");
    EXPECT_SAYS(refusal([&] { const auto other = fast.apply(); }), "End the scope of EMA::apply()");
    EXPECT_SAYS(refusal([&] { detail::state::collect({{"ema", fresh}}); }), "End the scope of EMA::apply()");
  }
  const auto scope = fast.apply();
  EXPECT_EQ(net->bias.item<float>(), 4);
}

// A scheduler of torch with a prepared optimizer.
TEST(Schedulers, APlateauLowersTheRateOfAPreparedOptimizer) {
  for (const auto fuse : {Fuse::always, Fuse::never}) {
    Training training(fuse);
    torch::optim::ReduceLROnPlateauScheduler plateau(*training.optimizer, torch::optim::ReduceLROnPlateauScheduler::min,
                                                     0.5F, /*patience=*/1);
    const auto lr = [&] { return training.optimizer->param_groups()[0].options().get_lr(); };
    for (int step = 0; step < 3; ++step) {
      training.step(step);
      plateau.step(1);
    }
    EXPECT_DOUBLE_EQ(lr(), 0.5e-2);
    const auto saved = detail::state::collect({{"plateau", plateau}});
    for (int step = 0; step < 2; ++step) plateau.step(1);
    EXPECT_DOUBLE_EQ(lr(), 0.25e-2);
    detail::state::restore({{"plateau", plateau}}, saved);
    const auto before = copies_of(*training.net);
    training.optimizer->param_groups()[0].options().set_lr(0);
    training.step(3);
    expect_equal(copies_of(*training.net), before, "the optimizer heeds its rate");
  }
}

TEST(Schedulers, ACycleMovesAPreparedOptimizersMomentum) {
  Training fused(Fuse::always), plain(Fuse::never);
  OneCycle of_fused(*fused.optimizer, {.max_lr = 1e-2, .total_steps = 20});
  OneCycle of_plain(*plain.optimizer, {.max_lr = 1e-2, .total_steps = 20});
  for (int step = 0; step < 25; ++step) {
    fused.step(step);
    plain.step(step);
    of_fused.step();
    of_plain.step();
  }
  EXPECT_EQ(fused.optimizer->fused(), world().size() > 1);
  const auto want = copies_of(*plain.net);
  for (const auto& [name, have] : copies_of(*fused.net))
    EXPECT_TRUE(at::allclose(have, want.at(name), 0, 1e-3)) << name << ": Adam makes rounding as large as that";
}

}  // namespace
}  // namespace muster::ema_test
