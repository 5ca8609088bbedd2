#include "train/params.hpp"

#include "base/file.hpp"
#include "muster/error.hpp"
#include "support/folder.hpp"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace muster::detail::train {
namespace {

Params sample() {
  return {
      .train_loop_config = {{"lr", 0.5}},
      .metadata = {{"who", "us"}},
      .scaling = {.num_workers = 3, .use_gpu = true, .threads_per_worker = 2, .virtual_workers = 12},
      .checkpoint = {.num_to_keep = 4, .checkpoint_score_attribute = "loss", .checkpoint_score_order = ScoreOrder::min},
      .max_failures = -1,
      .torch = {.backend = "gloo", .timeout = std::chrono::hours(1000)},
      .data = {.datasets_to_split = {"train", "more"}, .split_all = true}};
}

TEST(Params, ComeBackAsTheyWere) {
  const auto json = to_json(sample());
  const auto back = params_from_json(json, "it");
  EXPECT_EQ(to_json(back), json);
  EXPECT_EQ(back.torch.timeout, std::chrono::hours(1000));
  EXPECT_FALSE(back.finished);
  const auto plain = to_json(Params{});
  EXPECT_EQ(to_json(params_from_json(plain, "it")), plain);
}

TEST(Params, ThoseOfOlderVersionsAreRead) {
  auto json = to_json(sample());
  for (const char* key : {"torch_config", "dataset_config"}) json.erase(key);
  json["scaling_config"].erase("virtual_workers");
  json["something new"] = {1, 2};
  const auto back = params_from_json(json, "it");
  EXPECT_EQ(back.torch.backend, "auto");
  EXPECT_EQ(back.data.datasets_to_split, std::vector<std::string>{"train"});
}

TEST(Params, WhatCannotBeIsNamed) {
  const test::Folder folder;
  const auto refused = [&](const std::string& text, const std::string& fact) {
    write_file(folder / "params.json", text);
    try {
      read_params(folder.path());
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
      auto json = to_json(sample());
      json[Json::json_pointer(pointer)] = value;
      const std::string path(pointer);
      refused(json.dump(), path.ends_with("/0") ? "names" : path.substr(path.rfind('/') + 1));
    }
  for (const char* key : {"train_loop_config", "metadata", "scaling_config", "run_config"}) {
    auto json = to_json(sample());
    json.erase(key);
    refused(json.dump(), key);
  }
  refused("{", "params.json");
  refused("3", "not an object");
  refused(std::string(140'000, '['), "levels deep");
}

}  // namespace
}  // namespace muster::detail::train
