// The configuration of a run as JSON: every struct, every field, and whatever else such JSON may hold.
#include "muster/error.hpp"
#include "muster/trainer.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace muster::options_test {
namespace {

using std::chrono::milliseconds;

/// Values of every kind, of which a key takes few.
const std::vector<Json> anything = {nullptr,
                                    true,
                                    false,
                                    0,
                                    -1,
                                    1.5,
                                    1e300,
                                    1ull << 63,
                                    "",
                                    "max",
                                    "float32",
                                    "cuda:1",
                                    "cuda:x",
                                    "cuda:99999999999",
                                    "cuda:300",
                                    Json::array(),
                                    {1},
                                    {"a"},
                                    {{"a", 0.5}},
                                    Json::array({Json::array({"a", 0.5})}),
                                    Json::array({Json::array({"a", "b"})}),
                                    Json::object(),
                                    {{"a", "float32"}},
                                    {{"a", nullptr}}};

/// `options`, of which every field that is data is other than its default, is `json`, and nothing else can be.
template <class Options>
void check(const Options& options, const Json& json) {
  SCOPED_TRACE(json.dump());
  EXPECT_EQ(Json(options), json);
  EXPECT_EQ(Json(json.get<Options>()), json);
  const Json plain = Options{};
  EXPECT_EQ(Json(plain.get<Options>()), plain);
  EXPECT_EQ(Json(Json::object().get<Options>()), plain) << "a missing key keeps the default";
  ASSERT_EQ(plain.size(), json.size());
  for (const auto& [key, value] : json.items()) {
    ASSERT_TRUE(plain.contains(key)) << key;
    EXPECT_NE(plain.at(key), value) << key << " is tested by its default";
    auto alone = plain;
    alone[key] = value;
    EXPECT_EQ(Json(Json{{key, value}}.get<Options>()), alone);
    for (const Json& any : anything) {
      try {
        const Json read = Json{{key, any}}.get<Options>();
        if (!any.is_object()) {
          EXPECT_EQ(read.at(key), any) << key;
        }
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::data);
        EXPECT_NE(std::string(error.what()).find('"' + key + '"'), std::string::npos) << any << error.what();
      }
    }
  }
  for (const Json& any : {Json(), Json(3), Json("x"), Json::array(), Json{{"no option", 1}}}) {
    try {
      static_cast<void>(any.get<Options>());
      ADD_FAILURE() << any;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(any.is_object() ? "\"no option\"" : "not an object"), std::string::npos)
          << error.what();
    }
  }
}

TEST(Options, OfARunAreJson) {
  const ScalingConfig scaling{.num_workers = 3, .use_gpu = true, .threads_per_worker = 2, .virtual_workers = 12};
  const Json scaling_json{{"num_workers", 3}, {"use_gpu", true}, {"threads_per_worker", 2}, {"virtual_workers", 12}};
  check(scaling, scaling_json);
  const CheckpointConfig kept{.num_to_keep = 4,
                              .checkpoint_score_attribute = "loss",
                              .checkpoint_score_order = ScoreOrder::min,
                              .async_save = true,
                              .when_busy = WhenBusy::drop,
                              .fast_tier = "/dev/shm"};
  const Json kept_json{{"num_to_keep", 4},
                       {"checkpoint_score_attribute", "loss"},
                       {"checkpoint_score_order", "min"},
                       {"async_save", true},
                       {"when_busy", "drop"},
                       {"fast_tier", "/dev/shm"}};
  check(kept, kept_json);
  const ScalingConfig range{.num_workers = {2, 4}, .use_gpu = true, .threads_per_worker = 2, .virtual_workers = 12};
  EXPECT_EQ(Json(range).at("num_workers"), (Json{2, 4}));
  EXPECT_EQ(Json(Json(range).get<ScalingConfig>()), Json(range));
  EXPECT_EQ(Json(range).get<ScalingConfig>().num_workers, NumWorkers(2, 4));
  EXPECT_TRUE(Json(ScalingConfig{}).at("num_workers").is_null()) << "all";
  for (const Json& wrong : {Json::array({2}), Json::array({1, 2, 3}), Json::array({"a", 2}), Json::array({1.5, 2})})
    EXPECT_THROW(static_cast<void>(Json{{"num_workers", wrong}}.get<ScalingConfig>()), Error) << wrong;
  check(FailureConfig{.max_failures = -1,
                      .max_preemption_failures = 5,
                      .bad_numbers = BadNumbers::roll_back,
                      .bad_numbers_limit = 3},
        {{"max_failures", -1}, {"max_preemption_failures", 5}, {"bad_numbers", "roll_back"}, {"bad_numbers_limit", 3}});
  const LoggingConfig logging{.level = "warn", .file = false, .per_rank = false};
  const Json logging_json{{"level", "warn"}, {"file", false}, {"per_rank", false}};
  check(logging, logging_json);
  const RunConfig run{.name = "demo",
                      .storage_path = "/a/b",
                      .checkpoint_config = kept,
                      .failure_config = {.max_failures = 2},
                      .logging_config = logging,
                      .callbacks = {nullptr},
                      .tensorboard = true,
                      .histogram_interval = 3,
                      .profile = {.enabled = true, .first_step = 5, .last_step = 7, .operators = true}};
  const Json run_json{
      {"name", "demo"},
      {"storage_path", "/a/b"},
      {"checkpoint_config", kept_json},
      {"failure_config",
       {{"max_failures", 2}, {"max_preemption_failures", -1}, {"bad_numbers", "ignore"}, {"bad_numbers_limit", 10}}},
      {"logging_config", logging_json},
      {"tensorboard", true},
      {"histogram_interval", 3},
      {"profile", {{"enabled", true}, {"first_step", 5}, {"last_step", 7}, {"operators", true}}}};
  check(run, run_json);
  const TorchConfig torch{.backend = "gloo", .timeout = std::chrono::hours(1000)};
  const Json torch_json{{"backend", "gloo"}, {"timeout_ms", 3'600'000'000}};
  check(torch, torch_json);
  const DataConfig data{.datasets_to_split = {"train", "more"}, .split_all = true};
  const Json data_json{{"datasets_to_split", {"train", "more"}}, {"split_all", true}};
  check(data, data_json);

  const Json all{{"train_loop_config", {{"lr", 0.5}}},
                 {"torch_config", torch_json},
                 {"scaling_config", scaling_json},
                 {"dataset_config", data_json},
                 {"run_config", run_json},
                 {"metadata", {{"who", "us"}}},
                 {"validation", {{"timeout_ms", 600'000}}}};
  const TrainerOptions options{.train_loop_config = {{"lr", 0.5}},
                               .torch_config = torch,
                               .scaling_config = scaling,
                               .dataset_config = data,
                               .run_config = run,
                               .metadata = {{"who", "us"}},
                               .validation = {.timeout = std::chrono::minutes(10)}};
  EXPECT_EQ(Json(options), all);
  EXPECT_EQ(Json(all.get<TrainerOptions>()), all);
}

}  // namespace
}  // namespace muster::options_test
