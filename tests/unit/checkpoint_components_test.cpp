#include "muster/checkpoint.hpp"
#include "muster/error.hpp"
#include "muster/metrics.hpp"
#include "state/collect.hpp"
#include "state/fingerprint.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::state::checkpoint_components_test {
namespace {

using at::Tensor;
namespace optim = torch::optim;

/// tanh(x w + b) · v, with a buffer, and a parameter that takes no part.
struct Net : torch::nn::Module {
  explicit Net(double scale = 1, std::int64_t width = 3) {
    w = register_parameter("w", (at::arange(4 * width, at::kFloat).reshape({4, width}).sin() * scale));
    b = register_parameter("b", at::full({width}, scale, at::kFloat));
    v = register_parameter("v", (at::arange(width, at::kFloat).cos() * scale));
    unused = register_parameter("unused", at::full({2}, scale, at::kFloat));
    steps = register_buffer("steps", at::zeros({}, at::kLong));
  }
  Tensor loss(int batch) {
    const auto x = (at::arange(20, at::kFloat) + batch).reshape({5, 4}).cos();
    steps.add_(1);
    return ((x.matmul(w) + b).tanh().matmul(v) - x.sum(1)).pow(2).mean();
  }
  Tensor w, b, v, unused, steps;
};

void train(Net& net, optim::Optimizer& optimizer, int begin, int end) {
  for (int batch = begin; batch < end; ++batch)
    optimizer.step([&] {
      optimizer.zero_grad();
      auto loss = net.loss(batch);
      loss.backward();
      return loss;
    });
}

void expect_equal(const Net& a, const Net& b) {
  for (const auto& item : a.named_parameters())
    EXPECT_TRUE(at::equal(item.value(), b.named_parameters()[item.key()])) << item.key();
  EXPECT_TRUE(at::equal(a.steps, b.steps));
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

struct Kind {
  const char* name;
  /// An optimizer over two groups (LBFGS: one), with the settings of the saved or of the fresh one.
  std::function<std::unique_ptr<optim::Optimizer>(Net&, bool fresh)> make;
};

template <class Optimizer, class Options>
std::unique_ptr<optim::Optimizer> two_groups(Net& net, Options options, bool fresh) {
  auto other = options;
  other.lr(options.lr() / 3);
  if (fresh) {
    options.lr(options.lr() * 7);
    other.lr(1e-9);
  }
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{net.w, net.unused}, std::make_unique<Options>(options));
  groups.emplace_back(std::vector<Tensor>{net.b, net.v}, std::make_unique<Options>(other));
  return std::make_unique<Optimizer>(groups, options);
}

const Kind kinds[] = {
    {"SGD", [](Net& n, bool f) { return two_groups<optim::SGD>(n, optim::SGDOptions(0.1), f); }},
    {"SGDMomentum",
     [](Net& n, bool f) {
       return two_groups<optim::SGD>(n, optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(1e-3), f);
     }},
    {"Adam",
     [](Net& n, bool f) {
       return two_groups<optim::Adam>(n, optim::AdamOptions(0.01).betas({0.8, 0.95}), f);
     }},
    {"AdamAmsgrad",
     [](Net& n, bool f) { return two_groups<optim::Adam>(n, optim::AdamOptions(0.01).amsgrad(true), f); }},
    {"AdamW", [](Net& n, bool f) { return two_groups<optim::AdamW>(n, optim::AdamWOptions(0.01), f); }},
    {"Adagrad",
     [](Net& n, bool f) { return two_groups<optim::Adagrad>(n, optim::AdagradOptions(0.05).lr_decay(0.01), f); }},
    {"RMSprop",
     [](Net& n, bool f) {
       return two_groups<optim::RMSprop>(n, optim::RMSpropOptions(0.01).momentum(0.9).centered(true), f);
     }},
    {"LBFGS",
     [](Net& n, bool f) {
       return std::make_unique<optim::LBFGS>(std::vector<Tensor>{n.w, n.b, n.v},
                                             optim::LBFGSOptions(f ? 0.9 : 0.5).max_iter(4).history_size(3));
     }},
    {"LBFGSStrongWolfe",
     [](Net& n, bool) {
       return std::make_unique<optim::LBFGS>(std::vector<Tensor>{n.w, n.b, n.v},
                                             optim::LBFGSOptions(1).max_iter(3).line_search_fn("strong_wolfe"));
     }},
};

class Optimizers : public testing::TestWithParam<Kind> {};

TEST_P(Optimizers, GoOnBitForBit) {
  auto net = std::make_shared<Net>(0.5);
  const auto optimizer = GetParam().make(*net, false);
  train(*net, *optimizer, 0, 3);
  const auto saved = Checkpoint::from_dict({{"model", net}, {"optimizer", *optimizer}});

  auto fresh = std::make_shared<Net>(0.7);
  const auto fresh_optimizer = GetParam().make(*fresh, true);
  restore({{"model", fresh}, {"optimizer", *fresh_optimizer}}, saved.to_dict());
  auto stepped = std::make_shared<Net>(0.9);
  const auto stepped_optimizer = GetParam().make(*stepped, true);
  train(*stepped, *stepped_optimizer, 10, 15);
  restore({{"optimizer", *stepped_optimizer}, {"model", stepped}}, saved.to_dict());

  train(*net, *optimizer, 3, 6);
  train(*fresh, *fresh_optimizer, 3, 6);
  train(*stepped, *stepped_optimizer, 3, 6);
  expect_equal(*net, *fresh);
  expect_equal(*net, *stepped);
}

TEST_P(Optimizers, OfAFreshOneTakesBackStateThatWasThere) {
  auto net = std::make_shared<Net>(0.5);
  const auto optimizer = GetParam().make(*net, false);
  const auto saved = Checkpoint::from_dict({{"model", net}, {"optimizer", *optimizer}});
  auto stepped = std::make_shared<Net>(0.9);
  const auto stepped_optimizer = GetParam().make(*stepped, true);
  train(*stepped, *stepped_optimizer, 10, 12);
  restore({{"model", stepped}, {"optimizer", *stepped_optimizer}}, saved.to_dict());
  train(*net, *optimizer, 0, 3);
  train(*stepped, *stepped_optimizer, 0, 3);
  expect_equal(*net, *stepped);
}

TEST_P(Optimizers, AloneAreMatchedByTheOrderOfParameters) {
  auto net = std::make_shared<Net>(0.5);
  const auto optimizer = GetParam().make(*net, false);
  train(*net, *optimizer, 0, 2);
  const auto saved = Checkpoint::from_dict({{"model", net}, {"optimizer", *optimizer}});
  auto fresh = std::make_shared<Net>(0.7);
  const auto fresh_optimizer = GetParam().make(*fresh, true);
  saved.load("optimizer", *fresh_optimizer);
  saved.load("model", fresh);
  train(*net, *optimizer, 2, 4);
  train(*fresh, *fresh_optimizer, 2, 4);
  expect_equal(*net, *fresh);
}

INSTANTIATE_TEST_SUITE_P(All, Optimizers, testing::ValuesIn(kinds), [](const auto& kind) { return kind.param.name; });

TEST(Components, StateIsNamedAfterItsParameter) {
  auto net = std::make_shared<Net>();
  optim::Adam optimizer(net->parameters());
  train(*net, optimizer, 0, 1);
  const auto state = collect({{"net", net}, {"optimizer", optimizer}});
  EXPECT_TRUE(state.tensors.contains("net/w"));
  EXPECT_TRUE(state.tensors.contains("net/steps"));
  EXPECT_TRUE(state.tensors.contains("optimizer/net/w/exp_avg"));
  EXPECT_FALSE(state.tensors.contains("optimizer/net/w/max_exp_avg_sq"));
  EXPECT_FALSE(state.tensors.contains("optimizer/net/unused/exp_avg")) << "it has no gradient, so no state";
  EXPECT_EQ(state.values.at("optimizer").at("state").at("net/w").at("step"), 1);
  EXPECT_TRUE(state.tensors.at("net/w").is_alias_of(net->w)) << "nothing is copied";
}

TEST(Components, SchedulersGoOn) {
  auto net = std::make_shared<Net>();
  optim::SGD optimizer(net->parameters(), 1.0), other(net->parameters(), 5.0);
  optim::StepLR scheduler(optimizer, 3, 0.5), other_scheduler(other, 3, 0.5);
  optim::ReduceLROnPlateauScheduler plateau(optimizer, optim::ReduceLROnPlateauScheduler::min, 0.1f, 1),
      other_plateau(other, optim::ReduceLROnPlateauScheduler::min, 0.1f, 1);
  const auto lr = [](const optim::Optimizer& o) { return o.param_groups()[0].options().get_lr(); };
  const auto step = [](optim::StepLR& s, optim::ReduceLROnPlateauScheduler& p) { s.step(), p.step(1.0f); };
  const auto state_of = [&](optim::Optimizer& o, optim::StepLR& s, optim::ReduceLROnPlateauScheduler& p) {
    return StateEntries{{"model", net}, {"optimizer", o}, {"scheduler", s}, {"plateau", p}};
  };
  // Before its first step the plateau's best value is infinite.
  restore(state_of(other, other_scheduler, other_plateau),
          Checkpoint::from_dict(state_of(optimizer, scheduler, plateau)).to_dict());
  for (int i = 0; i < 2; ++i) step(scheduler, plateau);
  restore(state_of(other, other_scheduler, other_plateau),
          Checkpoint::from_dict(state_of(optimizer, scheduler, plateau)).to_dict());
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(lr(optimizer), lr(other)) << i;
    step(scheduler, plateau);
    step(other_scheduler, other_plateau);
  }
  EXPECT_LT(lr(optimizer), 0.1) << "both schedulers have acted";
}

TEST(Components, TextThatIsNotUtf8IsNamed) {
  std::string word = "caf\xe9";
  Json json = {{"list", {1, "caf\xe9"}}}, key = {{"caf\xe9", 1}};
  for (const auto& [entry, name] : std::vector<std::pair<StateEntry, std::string>>{
           {StateEntry(word), "word"}, {StateEntry(json), "word/list/1"}, {StateEntry(key), "word"}})
    try {
      Checkpoint::from_dict({{"word", entry}});
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("saving " + name + ":"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("not UTF-8"), std::string::npos) << error.what();
    }
}

TEST(Components, JsonThatCouldNotBeReadAgainIsNamed) {
  Json deep = 1, bytes = {{"list", {1, Json::binary({1, 2})}}};
  for (int level = 0; level < 300; ++level) deep = Json::array({std::move(deep)});
  for (const auto& [entry, fact] : std::vector<std::pair<StateEntry, std::string>>{
           {StateEntry(deep), "levels deep"}, {StateEntry(bytes), "a binary value"}})
    try {
      Checkpoint::from_dict({{"word", entry}});
      ADD_FAILURE() << fact;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("saving word:"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(fact), std::string::npos) << error.what();
    }
}

TEST(Components, ValuesComeBack) {
  double best = std::numeric_limits<double>::infinity(), worst = std::nan("");
  std::int64_t count = std::numeric_limits<std::int64_t>::min();
  std::string word = "zoë\n\"";
  Json json = {{"a", {1, 2.5, nullptr}}}, empty = Json::object(), nothing;
  auto mask = at::ones({2, 2}, at::kBool);
  StateDict given;
  const StateEntries entries{{"best", best},
                             {"worst", worst},
                             {"count", count},
                             {"word", word},
                             {"json", json},
                             {"empty", empty},
                             {"nothing", nothing},
                             {"mask", mask},
                             {"own", StateEntry(
                                         [&] {
                                           return StateDict{.tensors = {{"t/x", mask}}, .values = {{"n", 3}}};
                                         },
                                         [&](const StateDict& saved) { given = saved; })}};
  const auto saved = Checkpoint::from_dict(entries).to_dict();
  best = 1, worst = 2, count = 3, word = "", json = 4, empty = 5, nothing = 6;
  mask.zero_();
  restore(entries, saved);
  EXPECT_EQ(best, std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(worst));
  EXPECT_EQ(count, std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(word, "zoë\n\"");
  EXPECT_EQ(json, (Json{{"a", {1, 2.5, nullptr}}}));
  EXPECT_EQ(empty, Json::object());
  EXPECT_TRUE(nothing.is_null());
  EXPECT_TRUE(mask.all().item<bool>());
  EXPECT_TRUE(given.tensors.at("t/x").all().item<bool>());
  EXPECT_EQ(given.values.at("n"), 3);
}

TEST(Components, ExpandedTensorsComeBack) {
  auto rows = at::arange(3, at::kFloat).expand({4, 3}), one = at::full({}, 2, at::kLong).expand({5});
  const StateEntries entries{{"rows", rows}, {"one", one}};
  const auto saved = Checkpoint::from_dict(entries).to_dict();
  rows = at::zeros({3}).expand({4, 3}), one = at::zeros({}, at::kLong).expand({5});
  restore(entries, saved);
  EXPECT_TRUE(at::equal(rows, at::arange(3, at::kFloat).expand({4, 3})));
  EXPECT_TRUE(at::equal(one, at::full({5}, 2, at::kLong)));
}

TEST(Components, AnExpandedTensorRefusesValuesThatDiffer) {
  auto first = at::full({2}, 1.0), rows = at::arange(12, at::kFloat).view({4, 3}).contiguous();
  const StateEntries entries{{"first", first}, {"rows", rows}};
  const auto saved = Checkpoint::from_dict(entries).to_dict();
  first.fill_(2);
  rows = at::zeros({3}).expand({4, 3});
  try {
    restore(entries, saved);
    ADD_FAILURE() << "four rows do not fit into one";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_NE(
        std::string(error.what()).find("rows: expanded here, with other values in each repetition in the checkpoint"),
        std::string::npos)
        << error.what();
  }
  EXPECT_EQ(first[0].item<double>(), 2) << "nothing was changed";
}

struct Tied : torch::nn::Module {
  explicit Tied(double value, bool tied = true) {
    in = register_parameter("in", at::full({3}, value, at::kFloat));
    out = register_parameter("out", tied ? in : at::full({3}, value + 1, at::kFloat));
  }
  Tensor in, out;
};

TEST(Components, TiedWeightsStayTied) {
  const auto saved = Checkpoint::from_dict({{"model", std::make_shared<Tied>(1)}}).to_dict();
  EXPECT_TRUE(saved.tensors.at("model/in").is_alias_of(saved.tensors.at("model/out")));
  auto fresh = std::make_shared<Tied>(2);
  restore({{"model", fresh}}, saved);
  EXPECT_EQ(fresh->out[0].item<float>(), 1);
  EXPECT_TRUE(fresh->in.is_same(fresh->out));
  auto apart = std::make_shared<Tied>(2, false);
  restore({{"model", apart}}, saved);
  EXPECT_EQ(apart->out[0].item<float>(), 1);

  const auto two = collect({{"model", std::make_shared<Tied>(2, false)}});
  EXPECT_SAYS(error_of([&] { restore({{"model", fresh}}, two); }), "model/out: the same tensor as in here");
}

TEST(Components, DifferencesAreCountedAndTheFirstFiveListedAndNothingChanges) {
  auto net = std::make_shared<Net>(1), wide = std::make_shared<Net>(2, 5);
  optim::Adam optimizer(net->parameters());
  optim::SGD other(wide->parameters(), 0.1);
  train(*net, optimizer, 0, 1);
  double best = 1, extra = 2;
  auto state = collect({{"model", net}, {"optimizer", optimizer}, {"best", best}});
  state.tensors["model/old"] = at::ones({1});
  state.tensors.erase("model/v");
  state.tensors["model/steps"] = at::ones({}, at::kFloat);
  std::string text = "as before";
  const auto what = error_of([&] { restore({{"model", wide}, {"optimizer", other}, {"extra", extra}}, state); });
  for (const char* part : {"in 8 places", "model/w: shape [4, 3] in the checkpoint, [4, 5] here", "model/b: shape",
                           "model/steps: type Float in the checkpoint, Long here", "model/v: not in the checkpoint",
                           "model/old: in the checkpoint, not here"})
    EXPECT_SAYS(what, part);
  for (const char* part : {"optimizer", "extra", "best"}) EXPECT_EQ(what.find(part), std::string::npos) << what;
  optim::SGD same(net->parameters(), 0.1);
  const auto others = error_of([&] { restore({{"model", net}, {"optimizer", same}, {"extra", extra}}, state); });
  EXPECT_SAYS(others, "optimizer: the optimizer SGD here, Adam in the checkpoint");
  const auto names = error_of([&] { restore({{"extra", extra}}, collect({{"best", best}})); });
  for (const char* part : {"extra: not in the checkpoint", "best: in the checkpoint, not here"})
    EXPECT_SAYS(names, part);
  EXPECT_EQ(wide->b[0].item<float>(), 2);
  EXPECT_EQ(extra, 2);

  Json json = collect({{"best", best}}).values;
  EXPECT_SAYS(error_of([&] { restore({{"best", text}}, {.tensors = {}, .values = json}); }), "best: a string here");
  EXPECT_EQ(text, "as before");
}

TEST(Components, NumbersThatJsonDoesNotKeepAreKeptOrRefused) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  double best = -infinity;
  const auto given = Checkpoint::from_dict({{"best", infinity}, {"old", best}, {"epoch", 3}});
  given.load("best", best);
  EXPECT_EQ(best, infinity);
  given.load("old", best);
  EXPECT_EQ(best, -infinity);
  Json json{{"losses", {0.5, infinity}}};
  EXPECT_SAYS(error_of([&] { collect({{"best", json}}); }), "saving best/losses/1: it is inf");
  json["losses"][1] = nullptr;
  EXPECT_EQ(collect({{"best", json}}).values.at("best"), json);
}

TEST(Components, OptimizersOfOtherShapeAreRefused) {
  auto net = std::make_shared<Net>();
  optim::Adam optimizer(net->parameters());
  train(*net, optimizer, 0, 1);
  auto state = collect({{"model", net}, {"optimizer", optimizer}});

  auto groups = state;
  groups.values["optimizer"]["param_groups"].push_back(Json::object());
  EXPECT_SAYS(error_of([&] { restore({{"model", net}, {"optimizer", optimizer}}, groups); }), "1 groups of parameters");
  optim::Adam some({net->w, net->b});
  EXPECT_SAYS(error_of([&] {
                restore({{"model", net}, {"optimizer", some}}, state);
              }),
              "model/v only in the checkpoint");
  auto shape = state;
  shape.tensors["optimizer/model/w/exp_avg"] = at::ones({2});
  shape.tensors["optimizer/model/w/who"] = at::ones({2});
  shape.values["optimizer"]["param_groups"][0].erase("eps");
  shape.values["optimizer"]["state"]["model/b"]["step"] = "three";
  auto what = error_of([&] { restore({{"model", net}, {"optimizer", optimizer}}, shape); });
  EXPECT_SAYS(what, "optimizer/param_groups.0: eps is missing");
  shape.values["optimizer"]["param_groups"][0]["eps"] = 1e-8;
  what = error_of([&] { restore({{"model", net}, {"optimizer", optimizer}}, shape); });
  EXPECT_SAYS(what, "optimizer/model/w/exp_avg: shape [2]");
  EXPECT_SAYS(what, "optimizer/model/w/who: in the checkpoint, not here");
  EXPECT_SAYS(what, "optimizer/model/b: step is missing");
  for (const Json& nonsense : {Json(), Json(3), Json::array(), Json("x"), Json{{"kind", 4}}}) {
    auto broken = state;
    broken.values["optimizer"] = nonsense;
    EXPECT_THROW(restore({{"model", net}, {"optimizer", optimizer}}, broken), Error) << nonsense;
  }
}

TEST(Components, AUsersRefusalLeavesTheRestAlone) {
  double best = 1;
  const auto state =
      collect({{"best", best}, {"own", StateEntry([] { return StateDict{}; }, [](const StateDict&) {})}});
  best = 2;
  const StateEntry refusing([] { return StateDict{}; }, [](const StateDict&) { throw std::runtime_error("no"); });
  EXPECT_THROW(restore({{"best", best}, {"own", refusing}}, state), std::runtime_error);
  EXPECT_EQ(best, 2);
}

TEST(Components, WhatIsEachRanksOwnIsTakenByRank) {
  auto row = at::arange(3, at::kFloat);
  double number = 0;
  Json json;
  const StateEntries entries{{"row", per_rank(row)}, {"number", per_rank(number)}, {"json", per_rank(json)}};
  const auto taken = [&] { return Json{row[0].item<float>(), number, json}; };
  // The content of a save by three ranks.
  const StateDict saved{.tensors = {{"row", at::arange(9, at::kFloat).reshape({3, 3})}},
                        .values = {{"row", {Json::object(), Json::object(), Json::object()}},
                                   {"number", {0.5, "nan", 1.5}},
                                   {"json", {{{"a", 1}}, nullptr, {1, 2}}}}};
  restore(entries, saved, {0, 3});
  EXPECT_EQ(taken(), (Json{0, 0.5, {{"a", 1}}}));
  restore(entries, saved, {2, 3});
  EXPECT_EQ(taken(), (Json{6, 1.5, {1, 2}}));
  for (const RankInGroup here : {RankInGroup{0, 1}, RankInGroup{1, 2}, RankInGroup{3, 4}, RankInGroup{0, 0}}) {
    const auto what = error_of([&] { restore(entries, saved, here); });
    for (const char* entry : {"row: each of 3 ranks had its own", "number: each of 3 ranks", "json: each of 3 ranks"})
      EXPECT_SAYS(what, entry);
  }
  EXPECT_EQ(taken(), (Json{6, 1.5, {1, 2}})) << "nothing was changed";

  auto wide = at::zeros({2, 3}, at::kFloat);
  EXPECT_SAYS(error_of([&] {
                restore({{"row", per_rank(wide)}}, select_entry(saved, "row"), {0, 3});
              }),
              "row: shape [3] in the checkpoint, [2, 3] here");
  auto one = at::zeros({3}, at::kFloat);
  const auto for_all = collect({{"one", one}});
  EXPECT_SAYS(error_of([&] { restore({{"one", per_rank(one)}}, for_all, {0, 1}); }), "one: each rank's own here");
  EXPECT_SAYS(error_of([&] { restore({{"row", one}}, select_entry(saved, "row"), {0, 3}); }), "row: shape [3, 3]");
}

TEST(Components, WhatIsEachRanksOwnGoesThroughACheckpointOfOne) {
  auto row = at::arange(3, at::kFloat);
  double number = 0.25;
  const StateEntries entries{{"row", per_rank(row)}, {"number", per_rank(number)}};
  const auto checkpoint = Checkpoint::from_dict(entries);
  EXPECT_EQ(checkpoint.to_dict().tensors.at("row").sizes().vec(), (std::vector<std::int64_t>{1, 3}));
  row.zero_();
  number = 1;
  checkpoint.load("row", per_rank(row));
  checkpoint.load("number", per_rank(number));
  EXPECT_EQ(row[2].item<float>(), 2);
  EXPECT_EQ(number, 0.25);
  EXPECT_SAYS(error_of([&] { Checkpoint::from_directory(checkpoint.path()).load("row", per_rank(row)); }),
              "does not know which rank this is");
}

TEST(Components, AListForAllIsNotTakenForOneOfEachRanksOwn) {
  Json labels{"a"};
  const auto for_all = Checkpoint::from_dict({{"labels", labels}});
  const auto of_each = Checkpoint::from_dict({{"labels", per_rank(labels)}});
  EXPECT_SAYS(error_of([&] { for_all.load("labels", per_rank(labels)); }),
              "labels: each rank's own here, one for all in the checkpoint");
  EXPECT_SAYS(error_of([&] { of_each.load("labels", labels); }),
              "labels: one for all here, each rank's own in the checkpoint");
  EXPECT_EQ(labels, Json{"a"}) << "nothing was changed";
  for_all.load("labels", labels);
  of_each.load("labels", per_rank(labels));
  EXPECT_EQ(labels, Json{"a"});
}

TEST(Components, AMeanCountsOnceAtAnyNumberOfRanks) {
  Mean mean;
  const StateDict saved{.values = {{"loss", {{{"sum", 0.1}, {"samples", 1}}, {{"sum", 6}, {"samples", 3}}}}}};
  restore({{"loss", mean}}, saved, {1, 2});
  EXPECT_EQ(mean.value(), 2);
  EXPECT_EQ(mean.samples(), 3);
  restore({{"loss", mean}}, saved, {0, 3});
  EXPECT_EQ(mean.samples(), 4);
  EXPECT_DOUBLE_EQ(mean.value(), 6.1 / 4);
  for (const int rank : {1, 2}) {
    restore({{"loss", mean}}, saved, {rank, 3});
    EXPECT_EQ(mean.samples(), 0);
    EXPECT_TRUE(std::isnan(mean.value()));
  }
  mean.add(5, 2);
  for (const Json& nonsense : {Json(3), Json{{"sum", "x"}, {"samples", 1}}, Json{{"sum", 1}, {"samples", -1}}})
    for (const int count : {1, 2})
      EXPECT_SAYS(error_of([&] {
                    restore({{"loss", mean}}, {.values = {{"loss", Json::array({nonsense})}}}, {0, count});
                  }),
                  "loss: a mean here, something else");
  EXPECT_EQ(mean.value(), 5);
}

TEST(Fingerprints, OfADeviceSeeEveryBitAndEveryPlace) {
  for (const auto type : {at::kByte, at::kBool, at::kShort, at::kBFloat16, at::kHalf, at::kInt, at::kFloat, at::kLong,
                          at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    const auto values = at::arange(1, 1001, at::kInt).remainder(97).to(type);
    const auto sum = [](const Tensor& tensor) { return mixed_sum(tensor).item<std::int64_t>(); };
    const auto before = sum(values);
    EXPECT_EQ(sum(values.clone().reshape({40, 25})), before) << type;
    EXPECT_EQ(sum(values.reshape({40, 25}).t().contiguous().t()), before) << "by values, not by strides";
    std::set<std::int64_t> seen{before};
    auto bytes = values.clone();
    auto* const first = static_cast<unsigned char*>(bytes.mutable_data_ptr());
    for (const std::size_t at : {std::size_t{0}, bytes.nbytes() / 2, bytes.nbytes() - 1})
      for (const unsigned char bit : {1, 128}) {
        if (type == at::kBool && bit != 1) continue;
        first[at] ^= bit;
        EXPECT_TRUE(seen.insert(sum(bytes)).second) << type << " byte " << at;
        first[at] ^= bit;
      }
    auto swapped = values.clone();
    swapped[3].copy_(values[4]);
    swapped[4].copy_(values[3]);
    EXPECT_EQ(seen.insert(sum(swapped)).second, type != at::kBool) << type;
  }
  EXPECT_EQ(mixed_sum(at::ones({0, 3})).item<std::int64_t>(), 0);
  EXPECT_NE(mixed_sum(at::ones({})).item<std::int64_t>(), 0);
}

TEST(Components, NamesAreChecked) {
  double a = 1;
  auto net = std::make_shared<Net>();
  optim::Adam optimizer(net->parameters());
  EXPECT_SAYS(error_of([&] { collect({{"a", a}, {"a", a}}); }), "two entries");
  for (const char* name : {"", "a/b", ".", "..", "random", "gradients"})
    EXPECT_THROW(collect({{name, a}}), Error) << name;
  EXPECT_SAYS(error_of([&] { collect({{"optimizer", optimizer}}); }), "a parameter that no module");
  Tensor undefined;
  EXPECT_SAYS(error_of([&] { collect({{"t", undefined}}); }), "undefined");
}

}  // namespace
}  // namespace muster::detail::state::checkpoint_components_test
