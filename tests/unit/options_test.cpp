// Options as JSON: every struct, every field, and whatever else such JSON may hold.
#include "muster/callbacks.hpp"
#include "muster/classification.hpp"
#include "muster/convert.hpp"
#include "muster/data_loader.hpp"
#include "muster/ema.hpp"
#include "muster/error.hpp"
#include "muster/predictor.hpp"
#include "muster/process_group.hpp"
#include "muster/schedulers.hpp"
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
  check(FailureConfig{.max_failures = -1,
                      .max_preemption_failures = 5,
                      .bad_numbers = BadNumbers::roll_back,
                      .bad_numbers_limit = 3},
        {{"max_failures", -1}, {"max_preemption_failures", 5}, {"bad_numbers", "roll_back"}, {"bad_numbers_limit", 3}});
  const LoggingConfig logging{.level = "warn", .file = false, .per_rank = false};
  const Json logging_json{{"level", "warn"}, {"file", false}, {"per_rank", false}};
  check(logging, logging_json);
  check(EarlyStoppingOptions{.metric = "loss", .mode = ScoreOrder::max, .patience = 7, .min_delta = 0.5},
        {{"metric", "loss"}, {"mode", "max"}, {"patience", 7}, {"min_delta", 0.5}});
  check(PlateauOptions{.metric = "loss"}, {{"metric", "loss"}});
  check(LearningRateMonitorOptions{.name = "rate"}, {{"name", "rate"}});
  const RunConfig run{.name = "demo",
                      .storage_path = "/a/b",
                      .checkpoint_config = kept,
                      .failure_config = {.max_failures = 2},
                      .logging_config = logging,
                      .callbacks = {nullptr}};
  const Json run_json{
      {"name", "demo"},
      {"storage_path", "/a/b"},
      {"checkpoint_config", kept_json},
      {"failure_config",
       {{"max_failures", 2}, {"max_preemption_failures", -1}, {"bad_numbers", "ignore"}, {"bad_numbers_limit", 10}}},
      {"logging_config", logging_json}};
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

TEST(Options, OfDataAreJson) {
  check(DatasetOptions{.columns = {"x"}, .cache_bytes = 7}, {{"columns", {"x"}}, {"cache_bytes", 7}});
  check(
      BatchOptions{
          .batch_size = 2,
          .global_batch_size = 3,
          .training = false,
          .shuffle = true,
          .drop_last = true,
          .prefetch_batches = 4,
          .local_shuffle_buffer_size = 5,
          .local_shuffle_seed = 1ull << 63,
          .dtypes = {{"x", at::kFloat}, {"y", at::kBFloat16}},
          .device = at::Device(at::kCUDA, 1),
      },
      {{"batch_size", 2},
       {"global_batch_size", 3},
       {"training", false},
       {"shuffle", true},
       {"drop_last", true},
       {"prefetch_batches", 4},
       {"local_shuffle_buffer_size", 5},
       {"local_shuffle_seed", 1ull << 63},
       {"dtypes", {{"x", "float32"}, {"y", "bfloat16"}}},
       {"device", "cuda:1"}});
  check(DataLoaderOptions{.name = "other",
                          .batch_size = 2,
                          .global_batch_size = 3,
                          .shuffle = true,
                          .drop_last = true,
                          .training = false,
                          .workers = 4,
                          .timeout = milliseconds(5)},
        {{"name", "other"},
         {"batch_size", 2},
         {"global_batch_size", 3},
         {"shuffle", true},
         {"drop_last", true},
         {"training", false},
         {"workers", 4},
         {"timeout_ms", 5}});
  check(ConvertOptions{.columns = {"a"},
                       .chunk = 1,
                       .compress = 2,
                       .split = {{"train", 0.75}, {"rest", 0.25}},
                       .shuffle = 3,
                       .per_class = 4,
                       .header = true,
                       .progress = [](std::uint64_t, std::uint64_t) {}},
        {{"columns", {"a"}},
         {"chunk", 1},
         {"compress", 2},
         {"split", Json::array({Json::array({"train", 0.75}), Json::array({"rest", 0.25})})},
         {"shuffle", 3},
         {"per_class", 4},
         {"header", true}});
}

TEST(Options, OfSchedulesAveragesAndMetricsAreJson) {
  check(LinearWarmupOptions{.warmup_steps = 3, .start_factor = 0.5}, {{"warmup_steps", 3}, {"start_factor", 0.5}});
  check(CosineWithWarmupOptions{.warmup_steps = 3, .total_steps = 4, .min_lr = 0.25, .start_factor = 0.5},
        {{"warmup_steps", 3}, {"total_steps", 4}, {"min_lr", 0.25}, {"start_factor", 0.5}});
  check(OneCycleOptions{.max_lr = 0.5,
                        .total_steps = 7,
                        .pct_start = 0.25,
                        .anneal_strategy = Anneal::linear,
                        .cycle_momentum = false,
                        .base_momentum = 0.5,
                        .max_momentum = 0.75,
                        .div_factor = 2,
                        .final_div_factor = 3,
                        .three_phase = true},
        {{"max_lr", 0.5},
         {"total_steps", 7},
         {"pct_start", 0.25},
         {"anneal_strategy", "linear"},
         {"cycle_momentum", false},
         {"base_momentum", 0.5},
         {"max_momentum", 0.75},
         {"div_factor", 2.0},
         {"final_div_factor", 3.0},
         {"three_phase", true}});
  check(EMAOptions{.decay = 0.5, .warmup = true}, {{"decay", 0.5}, {"warmup", true}});
  check(AccuracyOptions{.top_k = 5}, {{"top_k", 5}});
  check(F1Options{.num_classes = 5, .average = Average::micro}, {{"num_classes", 5}, {"average", "micro"}});
  check(ConfusionMatrixOptions{.num_classes = 5}, {{"num_classes", 5}});
  check(MeanIoUOptions{.num_classes = 5}, {{"num_classes", 5}});
}

TEST(Options, OfASessionAreJson) {
  check(ModelOptions{.parallel = Parallel::none,
                     .bucket_bytes = 1,
                     .first_bucket_bytes = 2,
                     .comm_hook = fp16_compress_hook(),
                     .progress_thread = false,
                     .sync_batch_norm = true},
        {{"parallel", "none"},
         {"bucket_bytes", 1},
         {"first_bucket_bytes", 2},
         {"progress_thread", false},
         {"sync_batch_norm", true}});
  check(JoinOptions{.divide_by_initial_world_size = true}, {{"divide_by_initial_world_size", true}});
  check(
      PowerSgdOptions{.rank = 2, .start_iteration = 3, .min_compression_rate = 1.5, .error_feedback = false, .seed = 4},
      {{"rank", 2}, {"start_iteration", 3}, {"min_compression_rate", 1.5}, {"error_feedback", false}, {"seed", 4}});
  check(OptimizerOptions{.max_grad_norm = 0.5, .fuse = Fuse::never}, {{"max_grad_norm", 0.5}, {"fuse", "never"}});
  check(AutocastOptions{.dtype = at::kHalf, .enabled = false}, {{"dtype", "float16"}, {"enabled", false}});
  check(
      GradScalerOptions{
          .init_scale = 2, .growth_factor = 3, .backoff_factor = 0.25, .growth_interval = 4, .enabled = false},
      {{"init_scale", 2}, {"growth_factor", 3}, {"backoff_factor", 0.25}, {"growth_interval", 4}, {"enabled", false}});
  check(ProcessGroupOptions{.backend = "nccl", .timeout = milliseconds(6), .chunk = 7},
        {{"backend", "nccl"}, {"timeout_ms", 6}, {"chunk", 7}});
  check(ReportOptions{.reduce = false, .checkpoint_name = "best", .validation = true},
        {{"reduce", false}, {"checkpoint_name", "best"}, {"validation", true}});
  check(PredictorOptions{.feature_columns = {"x"}, .dtypes = {{"x", at::kHalf}}, .use_gpu = true},
        {{"feature_columns", {"x"}}, {"dtypes", {{"x", "float16"}}}, {"use_gpu", true}});
  check(PredictorOptions{.feature_columns = {"x"}, .dtypes = at::kHalf, .use_gpu = true},
        {{"feature_columns", {"x"}}, {"dtypes", "float16"}, {"use_gpu", true}});
  check(BatchPredictorOptions{.batch_size = 2, .keep_columns = {"y"}}, {{"batch_size", 2}, {"keep_columns", {"y"}}});
}

}  // namespace
}  // namespace muster::options_test
