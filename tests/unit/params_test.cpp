#include "run/params.hpp"

#include "base/file.hpp"
#include "muster/error.hpp"
#include "support/folder.hpp"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace muster::detail::run::params_test {
namespace {

TrainerOptions sample() {
  return {.train_loop_config = {{"lr", 0.5}},
          .torch_config = {.backend = "gloo", .timeout = std::chrono::hours(1000)},
          .scaling_config = {.num_workers = 3, .use_gpu = true, .threads_per_worker = 2, .virtual_workers = 12},
          .dataset_config = {.datasets_to_split = {"train", "more"}, .split_all = true},
          .run_config = {.name = "demo",
                         .storage_path = "/a/b",
                         .checkpoint_config = {.num_to_keep = 4,
                                               .checkpoint_score_attribute = "loss",
                                               .checkpoint_score_order = ScoreOrder::min},
                         .failure_config = {.max_failures = -1, .max_preemption_failures = 2}},
          .metadata = {{"who", "us"}}};
}

TEST(Params, ComeBackAsTheyWere) {
  const auto json = params_from_options(sample());
  const auto back = options_from_params(json, "it");
  EXPECT_EQ(Json(back), Json(sample()));
  EXPECT_EQ(back.torch_config.timeout, std::chrono::hours(1000));
  EXPECT_EQ(json.at("run_config").at("max_failures"), -1);
  EXPECT_EQ(json.at("run_config").at("max_preemption_failures"), 2) << "apart";
  EXPECT_FALSE(json.contains("finished"));
  EXPECT_EQ(Json(options_from_params(params_from_options({}), "it")), Json(TrainerOptions{}));
}

TEST(Params, ThoseOfOlderVersionsAreRead) {
  auto json = params_from_options(sample());
  for (const char* key : {"torch_config", "dataset_config"}) json.erase(key);
  json["scaling_config"].erase("virtual_workers");
  json["something new"] = {1, 2};
  json["scaling_config"]["something new"] = 1;
  const auto back = options_from_params(json, "it");
  EXPECT_EQ(back.torch_config.backend, "auto");
  EXPECT_EQ(back.dataset_config.datasets_to_split, std::vector<std::string>{"train"});
}

// The format of version 0.1.0, whose keys other tools read.
TEST(Params, KeepTheirPlaces) {
  const auto file = Json::parse(R"({
    "dataset_config": {"datasets_to_split": ["train", "more"], "split_all": true},
    "datasets": {"train": {"samples": 46}},
    "finished": true,
    "hosts": ["here"],
    "metadata": {"who": "us"},
    "muster_version": "0.1.0",
    "name": "demo",
    "num_ranks": 4,
    "program": "job",
    "run_config": {"checkpoint_score_attribute": "loss", "checkpoint_score_order": "min", "max_failures": -1,
                   "num_to_keep": 4},
    "scaling_config": {"num_workers": 3, "threads_per_worker": 2, "use_gpu": true, "virtual_workers": 12},
    "seed": 0,
    "threads_per_worker": 2,
    "torch_config": {"backend": "gloo", "timeout_ms": 3600000000},
    "train_loop_config": {"lr": 0.5},
    "world_size": 3
  })");
  auto was = sample();
  was.run_config.name.clear();
  was.run_config.storage_path.clear();
  was.run_config.failure_config.max_preemption_failures = -1;  // which that version did not have
  EXPECT_EQ(Json(options_from_params(file, "it")), Json(was));
  const auto now = params_from_options(sample()).flatten();
  for (const char* part :
       {"dataset_config", "metadata", "run_config", "scaling_config", "torch_config", "train_loop_config"}) {
    const auto then = Json{{part, file.at(part)}}.flatten();
    for (const auto& [key, value] : then.items()) EXPECT_EQ(now.value(key, Json("missing")), value) << key;
  }
}

TEST(Params, WhatCannotBeIsNamed) {
  const test::Folder folder;
  const auto refused = [&](const std::string& text, const std::string& fact) {
    write_file(folder / "params.json", text);
    try {
      saved_options(folder.path());
      ADD_FAILURE() << text.substr(0, 200);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::data);
      EXPECT_NE(std::string(error.what()).find(fact), std::string::npos) << error.what();
    }
  };
  const std::pair<const char*, std::vector<Json>> absurd[] = {
      {"/finished", {"yes", 1, nullptr}},
      {"/scaling_config", {3, nullptr, Json::array()}},
      {"/scaling_config/num_workers", {"3", 1.5, 1ull << 31, 1e300, true}},
      {"/scaling_config/use_gpu", {"yes", 1}},
      {"/run_config/num_to_keep", {"3", 1.5, -(1ll << 40)}},
      {"/run_config/checkpoint_score_attribute", {3, nullptr}},
      {"/run_config/checkpoint_score_order", {"most", 1}},
      {"/run_config/max_failures", {"3", 0.5}},
      {"/torch_config/backend", {3}},
      {"/torch_config/timeout_ms", {"3", 1ull << 63}},
      {"/dataset_config/datasets_to_split", {"train", 3}},
      {"/dataset_config/datasets_to_split/0", {3, nullptr}},
  };
  for (const auto& [pointer, values] : absurd)
    for (const auto& value : values) {
      auto json = params_from_options(sample());
      json[Json::json_pointer(pointer)] = value;
      const std::string path(pointer);
      refused(json.dump(), path.ends_with("/0") ? "names" : path.substr(path.rfind('/') + 1));
    }
  for (const char* key : {"train_loop_config", "metadata", "scaling_config", "run_config"}) {
    auto json = params_from_options(sample());
    json.erase(key);
    refused(json.dump(), key);
  }
  refused("{", "params.json");
  refused("3", "not an object");
  refused(std::string(140'000, '['), "levels deep");
}

}  // namespace
}  // namespace muster::detail::run::params_test
