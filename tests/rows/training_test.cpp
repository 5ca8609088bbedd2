// The vocabulary of Ray Train, word by word: what each means here. A test per row of ROWS.md, at any number of ranks.
#include "support/job.hpp"

#include "base/file.hpp"
#include "muster/data_loader.hpp"

#include <gtest/gtest.h>
#include <torch/data/datasets/map.h>
#include <torch/data/datasets/tensor.h>
#include <torch/data/samplers/distributed.h>
#include <torch/data/transforms/stack.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace muster::training_test {
namespace {

using test::launch;
using test::line;
using test::run;
using test::shared_folder;
using test::world;

TorchTrainerOptions named(std::string name) {
  return {.run_config = {.name = std::move(name)}, .datasets = {{"train", line()}}};
}

/// `count` samples that are the numbers from 0 on.
Dataset numbers(std::int64_t count) {
  return Dataset::from_tensors({{"x", torch::arange(count, torch::kFloat).unsqueeze(1)}});
}

/// The numbers of all ranks, sorted.
std::vector<std::int64_t> of_all(const Session& session, const std::vector<std::int64_t>& mine) {
  std::vector<std::int64_t> all;
  for (const auto& theirs : session.communicator().all_gather(Json(mine).dump()))
    for (const auto& one : Json::parse(theirs)) all.push_back(one);
  std::sort(all.begin(), all.end());
  return all;
}

std::vector<std::int64_t> from_zero(std::int64_t count) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

/// The rows of a batch that count.
std::vector<std::int64_t> rows_of(const Batch& batch) {
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < batch.size(); ++i) rows.push_back(batch["x"][i].item<std::int64_t>());
  return rows;
}

TEST(TrainRow, TrainingFunction) {
  const auto storage = shared_folder();
  int calls = 0;
  EXPECT_EQ(run({storage, {}, named("one")}, [&](Session&, const Config&) { ++calls; }).first, 0);
  EXPECT_EQ(calls, 1) << "once on each worker";
  const auto without_config = [&](Launch& launch) {
    return TorchTrainer(
               launch, [&](Session&) { ++calls; }, named("without"))
        .fit();
  };
  EXPECT_EQ(launch({storage}, without_config).first, 0);
  EXPECT_EQ(calls, 2);

  // The program's values are overridden by a file, these by flags; the result is saved with the run.
  auto options = named("set");
  options.train_loop_config = {{"lr", 0.5}, {"layers", 2}, {"width", 8}};
  if (world().rank() == 0) std::ofstream(storage / "config.json") << R"({"layers": 3, "width": 9})";
  world().barrier();
  Config seen;
  run({storage, {"--config", (storage / "config.json").string(), "--set", "width=10"}, options},
      [&](Session&, const Config& config) { seen = config; });
  EXPECT_EQ(seen, Json({{"lr", 0.5}, {"layers", 3}, {"width", 10}}));
  EXPECT_EQ(Json::parse(detail::read_file(storage / "set" / "params.json")).at("train_loop_config"), seen);
}

TEST(TrainRow, Worker) {
  int rank = -1, size = 0;
  run({shared_folder(), {}, named("ranks")}, [&](Session& session, const Config&) {
    rank = session.world_rank();
    size = session.world_size();
  });
  EXPECT_EQ(rank, world().rank());
  EXPECT_EQ(size, world().size());
}

TEST(TrainRow, RunConfig) {
  struct Told : Callback {
    void on_report(const Json& row) override { loss = row.at("loss"); }
    double loss = 0;
  };
  const auto storage = shared_folder();
  const auto told = std::make_shared<Told>();
  auto options = named("here");
  options.run_config.storage_path = storage;
  options.run_config.callbacks = {told};
  const auto train = [](Session& session) { session.report({{"loss", 0.25}}); };
  std::optional<Result> result;
  // Without --storage, the option's is used.
  std::vector<std::string> words{"job", "--progress", "none", "--log-level", "error"};
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  Launch launch(static_cast<int>(argv.size()), argv.data());
  EXPECT_EQ(launch.run([&] { return *(result = TorchTrainer(launch, train, options).fit()); }), 0);
  EXPECT_EQ(result->path, storage / "here");
  EXPECT_TRUE(std::filesystem::exists(storage / "here" / "result.json"));
  EXPECT_EQ(told->loss, 0.25);
}

TEST(TrainRow, CheckpointConfig) {
  // The score, not the age, decides; the newest stays beside the best.
  const std::vector<double> scores{0.1, 0.9, 0.3, 0.8, 0.2};
  const auto kept = [&](const CheckpointConfig& config) {
    auto options = named("kept");
    options.run_config.checkpoint_config = config;
    const auto result = run({shared_folder(), {}, options}, [&](Session& session, const Config&) {
      for (double score : scores) {
        auto state = session.state({{"score", score}});
        session.report({{"score", score}}, state);
      }
    });
    std::vector<double> left;
    for (const auto& [checkpoint, metrics] : result.second->best_checkpoints) {
      EXPECT_EQ(checkpoint.to_dict().values.at("score"), metrics.at("score"));
      left.push_back(metrics.at("score"));
    }
    return left;
  };
  EXPECT_EQ(kept({}), (std::vector{0.2, 0.8, 0.3, 0.9, 0.1})) << "all, the newest first";
  EXPECT_EQ(kept({.num_to_keep = 2}), (std::vector{0.2, 0.8}));
  EXPECT_EQ(kept({.num_to_keep = 2, .checkpoint_score_attribute = "score"}), (std::vector{0.9, 0.8, 0.2}));
  EXPECT_EQ(kept({.num_to_keep = 2, .checkpoint_score_attribute = "score", .checkpoint_score_order = ScoreOrder::min}),
            (std::vector{0.1, 0.2}));
}

TEST(TrainRow, FailureConfig) {
  const auto attempts = [](int max_failures, int failures) {
    auto options = named("fails");
    options.run_config.failure_config.max_failures = max_failures;
    int attempts = 0;
    const auto code = run({shared_folder(), {}, options}, [&](Session& session, const Config&) {
                        if (++attempts <= failures && session.world_rank() == session.world_size() - 1)
                          throw std::runtime_error("a passing trouble");
                      }).first;
    EXPECT_EQ(code, attempts > failures ? 0 : 1);
    return attempts;
  };
  EXPECT_EQ(attempts(0, 1), 1) << "none unless said";
  EXPECT_EQ(attempts(2, 2), 3);
  EXPECT_EQ(attempts(2, 3), 3) << "not one more";
  EXPECT_EQ(attempts(-1, 3), 4) << "without limit";
}

TEST(TrainRow, TorchConfig) {
  auto options = named("backend");
  std::string name;
  double mean = 0;
  EXPECT_EQ(run({shared_folder(), {}, options},
                [&](Session& session, const Config&) {
                  name = session.process_group()->getBackend(c10::kCPU)->getBackendName();
                  mean = session.mean(torch::full({1}, static_cast<double>(session.world_rank()))).item<double>();
                })
                .first,
            0);
  EXPECT_EQ(name, "muster") << "over MPI unless said";
  EXPECT_DOUBLE_EQ(mean, (world().size() - 1) / 2.0);

  options.torch_config.backend = "carrier pigeon";
  const auto refused = run({shared_folder(), {}, options}, [](Session&, const Config&) { FAIL(); });
  EXPECT_EQ(refused.first, 64);

  // Ranks that wait longer than the limit end with an error that names the limit.
  if (world().size() == 1) return;
  options.torch_config = {.timeout = std::chrono::milliseconds(250)};
  const auto late = run({shared_folder(), {}, options}, [&](Session& session, const Config&) {
    if (session.world_rank() == 0) return session.barrier();
    std::vector<at::Tensor> never{torch::ones({1})};
    session.process_group()->recv(never, 0, 0)->wait(std::chrono::minutes(1));
  });
  EXPECT_EQ(late.first, 75);
  ASSERT_TRUE(late.second && late.second->error);
  EXPECT_NE(std::string(late.second->error->what()).find("within 0.25"), std::string::npos)
      << late.second->error->what();
}

TEST(TrainRow, Backend) {
  struct Told : Backend {
    explicit Told(std::string& said) : said_(said) {}
    void on_start(Session&) override { said_ += "start "; }
    void on_training_start(Session&) override { said_ += "training_start "; }
    void on_shutdown(Session& session) override { said_ += session.failed() ? "failed" : "shutdown"; }
    std::string& said_;
  };
  struct Config_ : BackendConfig {
    explicit Config_(std::string& said) : said_(said) {}
    std::unique_ptr<Backend> make_backend() const override { return std::make_unique<Told>(said_); }
    std::string& said_;
  };
  const auto said = [](const TrainLoop& loop) {
    std::string said;
    launch({shared_folder()}, [&](Launch& launch) {
      return DataParallelTrainer(launch,
                                 [&](Session& session, const Config& config) {
                                   said += "train ";
                                   loop(session, config);
                                 },
                                 {.backend_config = std::make_shared<Config_>(said), .run_config = {.name = "told"}})
          .fit();
    });
    return said;
  };
  EXPECT_EQ(said([](Session&) {}), "start training_start train shutdown");
  EXPECT_EQ(said([](Session&) { throw std::runtime_error("trouble"); }), "start training_start train failed");
}

TEST(TrainRow, TorchTrainer) {
  // It is a DataParallelTrainer whose workers have a process group without having asked for one.
  static_assert(std::derived_from<TorchTrainer, DataParallelTrainer>);
  int size = 0;
  run({shared_folder(), {}, named("torch")},
      [&](Session& session, const Config&) { size = session.process_group()->getSize(); });
  EXPECT_EQ(size, world().size());
}

TEST(TrainRow, Fit) {
  // The error is in the Result on every rank, and its code is the program's.
  const auto failed = run({shared_folder(), {}, named("fails")}, [](Session& session, const Config&) {
    if (session.world_rank() == 0) throw Error(ExitCode::data, "reading", "there is nothing");
  });
  EXPECT_EQ(failed.first, 65);
  ASSERT_TRUE(failed.second && failed.second->error);
  EXPECT_NE(std::string(failed.second->error->what()).find("reading: there is nothing"), std::string::npos);
  for (const auto& theirs : world().all_gather(failed.second->error->what()))
    EXPECT_EQ(theirs, failed.second->error->what());
  const auto done = run({shared_folder(), {}, named("fits")}, [](Session&, const Config&) {});
  EXPECT_EQ(done.first, 0);
  EXPECT_FALSE(done.second->error);
}

TEST(TrainRow, Restore) {
  const auto storage = shared_folder();
  const auto path = storage / "restored";
  double value = 0;
  const auto counts_to = [&](double last) {
    return [&value, last](Session& session, const Config&) {
      auto state = session.state({{"value", value}});
      value = 0;
      state.restore();
      while (value < last) {
        ++value;
        session.report({{"value", value}}, state);
        if (value == 2 && last == 3) throw std::runtime_error("in the middle");
      }
    };
  };
  EXPECT_FALSE(TorchTrainer::can_restore(path));
  auto options = named("restored");
  options.metadata = {{"who", "we"}};
  EXPECT_EQ(run({storage, {}, options}, counts_to(3)).first, 1);
  EXPECT_TRUE(TorchTrainer::can_restore(path));

  const auto restored = launch({storage}, [&](Launch& launch) {
    return TorchTrainer::restore(launch, path,
                                 [&](Session& session, const Config& config) {
                                   EXPECT_EQ(session.metadata(), Json({{"who", "we"}}));
                                   EXPECT_TRUE(session.get_checkpoint());
                                   counts_to(4)(session, config);
                                 },
                                 {.datasets = {{"train", line()}}})
        .fit();
  });
  EXPECT_EQ(restored.first, 0);
  EXPECT_EQ(value, 4);
  EXPECT_EQ(restored.second->metrics_history.size(), 4u) << "two before, two after";

  // Another run that starts from this one's last checkpoint.
  auto next = named("next");
  next.resume_from_checkpoint = restored.second->checkpoint;
  EXPECT_EQ(run({storage, {}, next}, counts_to(6)).first, 0);
  EXPECT_EQ(value, 6);
}

TEST(TrainRow, Datasets) {
  // The key "train" is split, every other is whole on each; DataConfig changes that, by names or for all.
  const auto seen = [](const DataConfig& config) {
    std::pair<std::int64_t, std::int64_t> seen{0, 0};
    const auto count = [](const DatasetShard& shard) {
      std::int64_t samples = 0;
      for (const auto& batch : shard.iter_batches({.batch_size = 2, .training = false})) samples += batch.size();
      return samples;
    };
    auto options = named("split");
    options.dataset_config = config;
    options.datasets = {{"train", numbers(12)}, {"valid", numbers(6)}};
    run({shared_folder(), {}, options}, [&](Session& session, const Config&) {
      seen = {count(session.get_dataset_shard()), count(session.get_dataset_shard("valid"))};
      EXPECT_EQ(session.get_dataset_shard("valid").count(), 6) << "of the whole dataset";
    });
    return seen;
  };
  const std::int64_t ranks = world().size();
  EXPECT_EQ(seen({}), std::pair(12 / ranks, std::int64_t{6}));
  EXPECT_EQ(seen({.datasets_to_split = {"valid"}}), std::pair(std::int64_t{12}, 6 / ranks));
  EXPECT_EQ(seen({.datasets_to_split = {"train", "valid"}}), std::pair(12 / ranks, 6 / ranks));
  EXPECT_EQ(seen({.split_all = true}), std::pair(12 / ranks, 6 / ranks));
}

TEST(TrainRow, FromTensors) {
  const auto x = torch::arange(6, torch::kFloat).view({3, 2});
  const auto data = Dataset::from_tensors({{"x", x}, {"y", torch::arange(3)}});
  EXPECT_EQ(data.count(), 3);
  EXPECT_EQ(data.schema(), (Schema{{"x", at::kFloat, {2}}, {"y", at::kLong, {}}}));
  const std::vector<std::int64_t> chosen{2, 0};
  const auto batch = data.read(chosen);
  EXPECT_TRUE(batch["x"].equal(x.index_select(0, torch::tensor({2, 0}))));
  EXPECT_TRUE(batch["y"].equal(torch::tensor({2, 0}, torch::kLong)));
}

TEST(TrainRow, Result) {
  const auto storage = shared_folder();
  const auto train = [](Session& session, const Config&) {
    for (double loss : {3.0, 1.0, 2.0}) {
      auto state = session.state({{"loss", loss}});
      session.report({{"loss", loss}}, state);
    }
  };
  auto options = named("result");
  options.run_config.checkpoint_config = {.checkpoint_score_attribute = "loss",
                                          .checkpoint_score_order = ScoreOrder::min};
  const auto result = *run({storage, {}, options}, train).second;
  EXPECT_EQ(result.metrics.at("loss"), 2.0) << "the last one's, not the best";
  ASSERT_TRUE(result.checkpoint);
  EXPECT_EQ(result.checkpoint->to_dict().values.at("loss"), 2.0);
  EXPECT_EQ(result.path, storage / "result");
  EXPECT_FALSE(result.error);
  ASSERT_EQ(result.best_checkpoints.size(), 3u);
  EXPECT_EQ(result.best_checkpoints.front().second.at("loss"), 1.0);
  ASSERT_EQ(result.metrics_history.size(), 3u);
  EXPECT_EQ(result.metrics_history.front().at("loss"), 3.0);
}

TEST(TrainRow, Report) {
  const auto storage = shared_folder();
  const int ranks = world().size();
  const auto result = *run({storage, {}, named("report")}, [&](Session& session, const Config&) {
                         const int rank = session.world_rank();
                         Mean loss;
                         loss.add(rank, rank + 1);
                         Metrics metrics{{"mean", static_cast<double>(rank)},
                                         {"weighted", loss},
                                         {"same", 7},
                                         {"nan", std::nan("")},
                                         {"epoch", 41}};
                         if (rank == ranks - 1) metrics.insert({"of_one", 5});  // the keys are the union
                         session.report(metrics);
                         session.report({{"rank", rank}}, {.reduce = false});

                         // The files of several ranks' directories are merged.
                         const auto mine =
                             std::filesystem::temp_directory_path() / ("rows-" + std::to_string(::getpid()));
                         std::filesystem::create_directory(mine);
                         std::ofstream(mine / ("of_" + std::to_string(rank))) << rank;
                         std::ofstream(mine / "of_all") << "alike";
                         session.report({{"a", 1}}, Checkpoint::from_directory(mine));
                         std::filesystem::remove_all(mine);
                       }).second;
  ASSERT_FALSE(result.error) << result.error->what();
  const auto& row = result.metrics_history.at(0);
  EXPECT_DOUBLE_EQ(row.at("mean"), (ranks - 1) / 2.0);
  double sum = 0, samples = 0;
  for (int rank = 0; rank < ranks; ++rank) sum += rank * (rank + 1), samples += rank + 1;
  EXPECT_DOUBLE_EQ(row.at("weighted"), sum / samples);
  EXPECT_TRUE(row.at("same").is_number_integer());
  EXPECT_EQ(row.at("same"), 7);
  EXPECT_TRUE(row.at("nan").is_null());
  EXPECT_EQ(row.at("epoch"), 41) << "the user's wins";
  EXPECT_EQ(row.at("of_one"), 5);
  std::vector<int> each(static_cast<std::size_t>(ranks));
  std::iota(each.begin(), each.end(), 0);
  EXPECT_EQ(result.metrics_history.at(1).at("rank"), Json(each));
  ASSERT_TRUE(result.checkpoint);
  for (int rank = 0; rank < ranks; ++rank)
    EXPECT_EQ(detail::read_file(result.checkpoint->path() / ("of_" + std::to_string(rank))), std::to_string(rank));
  EXPECT_EQ(detail::read_file(result.checkpoint->path() / "of_all"), "alike");

  const auto reserved = run({storage, {}, named("reserved")}, [](Session& session, const Config&) {
    session.report({{"timestamp", 1}});
  });
  EXPECT_EQ(reserved.first, 1);
  EXPECT_NE(std::string(reserved.second->error->what()).find("timestamp"), std::string::npos);
}

TEST(TrainRow, Accessors) {
  auto options = named("mine");
  options.metadata = {{"key", 1}};
  EXPECT_EQ(run({shared_folder(), {}, options},
                [&](Session& session, const Config&) {
                  const auto& topology = world().topology();
                  EXPECT_EQ(session.world_size(), world().size());
                  EXPECT_EQ(session.world_rank(), world().rank());
                  EXPECT_GE(session.local_rank(), 0);
                  EXPECT_LT(session.local_rank(), session.local_world_size());
                  EXPECT_EQ(session.num_nodes(), topology.num_nodes);
                  EXPECT_EQ(session.node_rank(), topology.node_rank);
                  EXPECT_EQ(session.local_rank(), topology.local_rank);
                  EXPECT_EQ(session.trial_name(), "mine");
                  EXPECT_EQ(session.experiment_name(), "mine");
                  EXPECT_EQ(session.metadata(), Json({{"key", 1}}));
                  EXPECT_EQ(session.process_group()->getSize(), session.world_size());
                  EXPECT_FALSE(session.get_checkpoint());
                  session.barrier();
                  const auto rank = torch::full({2}, static_cast<float>(session.world_rank()));
                  const auto mean = session.mean(rank);
                  EXPECT_TRUE(mean.allclose(torch::full({2}, static_cast<float>(session.world_size() - 1) / 2)));
                })
                .first,
            0);
}

TEST(TrainRow, GetDevice) {
  run({shared_folder(), {}, named("device")},
      [](Session& session, const Config&) { EXPECT_EQ(session.get_device(), at::Device(at::kCPU)); });
}

TEST(TrainRow, PrepareModel) {
  run({shared_folder(), {}, named("model")}, [](Session& session, const Config&) {
    torch::manual_seed(session.world_rank());
    torch::nn::Linear net(1, 1);
    const auto own = net->weight.detach().clone();
    torch::nn::Linear prepared = session.prepare_model(net);
    EXPECT_EQ(prepared.get(), net.get()) << "the same module";
    const auto weights = session.communicator().all_gather(std::to_string(net->weight.item<float>()));
    EXPECT_EQ(std::count(weights.begin(), weights.end(), weights.front()), session.world_size());
    prepared->forward(torch::full({1, 1}, static_cast<float>(session.world_rank()))).sum().backward();
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), static_cast<float>(session.world_size() - 1) / 2);

    // It is only moved to the device: each rank keeps its own weights and gradients.
    torch::nn::Linear alone(1, 1);
    torch::nn::init::constant_(alone->weight, session.world_rank());
    session.prepare_model(alone, {.parallel = Parallel::none});
    EXPECT_EQ(alone->weight.item<float>(), static_cast<float>(session.world_rank()));
    alone->forward(torch::full({1, 1}, static_cast<float>(session.world_rank()))).sum().backward();
    EXPECT_EQ(alone->weight.grad().item<float>(), static_cast<float>(session.world_rank()));
  });
}

TEST(TrainRow, NoModulePrefix) {
  const auto result =
      *run({shared_folder(), {}, named("names")}, [](Session& session, const Config&) {
         auto net = session.prepare_model(torch::nn::Sequential(torch::nn::Linear(1, 2), torch::nn::BatchNorm1d(2)));
         session.report({{"a", 1}}, session.state({{"model", net}}));
       }).second;
  std::vector<std::string> names;
  for (const auto& [name, tensor] : result.checkpoint->to_dict().tensors) names.push_back(name);
  EXPECT_EQ(names,
            (std::vector<std::string>{"model/0.bias", "model/0.weight", "model/1.bias", "model/1.num_batches_tracked",
                                      "model/1.running_mean", "model/1.running_var", "model/1.weight"}));
}

auto stacked(std::int64_t count) {
  return torch::data::datasets::TensorDataset(torch::arange(count))
      .map(torch::data::transforms::Stack<torch::data::TensorExample>());
}

TEST(TrainRow, PrepareDataLoader) {
  run({shared_folder(), {}, named("loader")}, [](Session& session, const Config&) {
    const auto samples = [&](auto& loader) {
      std::vector<std::int64_t> mine;
      for (auto& batch : *loader)
        for (std::int64_t i = 0; i < loader->batch_samples(); ++i)
          mine.push_back(batch.data[i].template item<std::int64_t>());
      return mine;
    };
    auto divided = prepare_data_loader(session, stacked(7), {.batch_size = 2, .shuffle = true, .training = false});
    EXPECT_EQ(of_all(session, samples(divided)), from_zero(7)) << "a distributed sampler has been added";

    // The user's own sampler is kept; this one gives every rank the same half.
    torch::data::samplers::DistributedSequentialSampler own(8, 2, 0);
    auto kept = prepare_data_loader(session, stacked(8), {.batch_size = 2, .training = false}, own);
    EXPECT_EQ(samples(kept), from_zero(4));
  });
}

TEST(TrainRow, SetEpoch) {
  run({shared_folder(), {}, named("epochs")}, [](Session& session, const Config&) {
    auto shard = session.get_dataset_shard();
    auto loader = prepare_data_loader(session, stacked(40), {.batch_size = 40, .shuffle = true, .training = false});
    const auto order = [&](std::int64_t epoch) {
      shard.set_epoch(epoch);
      loader->set_epoch(epoch);
      std::pair<std::vector<float>, std::vector<std::int64_t>> order;
      for (auto& batch : shard.iter_torch_batches({.batch_size = 46, .training = false, .shuffle = true}))
        for (std::int64_t i = 0; i < batch.size(); ++i) order.first.push_back(batch["x"][i].item<float>());
      for (auto& batch : *loader)
        for (std::int64_t i = 0; i < loader->batch_samples(); ++i)
          order.second.push_back(batch.data[i].template item<std::int64_t>());
      return order;
    };
    const auto first = order(0), second = order(1);
    EXPECT_NE(first.first, second.first);
    EXPECT_NE(first.second, second.second);
  });
}

TEST(TrainRow, IterTorchBatches) {
  auto options = named("batches");
  options.datasets = {{"train", Dataset::from_tensors({{"x", torch::arange(30)}})}};
  run({shared_folder(), {}, options}, [](Session& session, const Config&) {
    auto shard = session.get_dataset_shard();
    const std::int64_t ranks = session.world_size();
    const auto take = [&](BatchOptions batches, std::vector<std::int64_t>* sizes = nullptr) {
      batches.training = false;
      std::vector<std::int64_t> mine;
      for (const auto& batch : shard.iter_torch_batches(batches)) {
        if (sizes != nullptr) sizes->push_back(batch.global_size());
        for (const auto row : rows_of(batch)) mine.push_back(row);
      }
      return mine;
    };
    std::vector<std::int64_t> sizes;
    EXPECT_EQ(of_all(session, take({}, &sizes)), from_zero(30));
    EXPECT_EQ(sizes, std::vector<std::int64_t>{30}) << "256 samples per worker and step unless said";

    sizes.clear();
    take({.batch_size = 4}, &sizes);
    EXPECT_EQ(sizes.front(), 4 * ranks);
    sizes.clear();
    take({.global_batch_size = 12}, &sizes);
    EXPECT_EQ(sizes, (std::vector<std::int64_t>{12, 12, 6})) << "at any number of workers";
    sizes.clear();
    EXPECT_EQ(of_all(session, take({.global_batch_size = 12, .drop_last = true}, &sizes)), from_zero(24));
    EXPECT_EQ(sizes, (std::vector<std::int64_t>{12, 12}));

    const auto shuffled = take({.global_batch_size = 12, .shuffle = true, .prefetch_batches = 3});
    EXPECT_FALSE(std::is_sorted(shuffled.begin(), shuffled.end()));
    EXPECT_EQ(of_all(session, shuffled), from_zero(30)) << "of the whole dataset";
    const auto local = take({.batch_size = 10, .local_shuffle_buffer_size = 10, .local_shuffle_seed = 5});
    EXPECT_EQ(of_all(session, local), from_zero(30));
    EXPECT_FALSE(std::is_sorted(local.begin(), local.begin() + 10));
    const auto [lowest, highest] = std::minmax_element(local.begin(), local.begin() + 10);
    EXPECT_LT(*highest - *lowest, 10 * ranks) << "within a stretch";

    for (const auto& batch :
         shard.iter_torch_batches({.training = false, .dtypes = {{"x", at::kDouble}}, .device = at::kCPU}))
      EXPECT_EQ(batch["x"].scalar_type(), at::kDouble);
    for (const auto& batch : shard.iter_batches({.training = false}))
      EXPECT_EQ(batch["x"].scalar_type(), at::kLong) << "as stored";
    for (const auto& batch : shard.iter_batches({.training = false, .dtypes = {{"x", at::kDouble}}}))
      EXPECT_EQ(batch["x"].scalar_type(), at::kDouble);
  });
}

TEST(TrainRow, Checkpoint) {
  const auto folder = shared_folder() / std::to_string(world().rank());
  double rate = 0.5;
  auto weights = torch::arange(3, torch::kFloat);
  auto made = Checkpoint::from_dict({{"rate", rate}, {"weights", weights}});
  EXPECT_EQ(made.to_dict().values.at("rate"), 0.5);
  EXPECT_TRUE(made.to_dict().tensors.at("weights").equal(weights));
  EXPECT_EQ(made.get_metadata(), Json::object());
  made.set_metadata({{"by", "us"}});

  made.to_directory(folder);
  const auto copy = Checkpoint::from_directory(folder);
  EXPECT_EQ(copy.path(), folder);
  EXPECT_EQ(copy.get_metadata(), Json({{"by", "us"}}));
  rate = 0;
  copy.load("rate", rate);
  EXPECT_EQ(rate, 0.5);
  EXPECT_THROW(Checkpoint::from_directory(folder / "nowhere"), Error);

  // Through a report and back into the training function.
  const auto storage = shared_folder();
  const auto result = *run({storage, {}, named("given")}, [&](Session& session, const Config&) {
                         session.report({{"a", 1}}, Checkpoint::from_dict({{"rate", rate}}));
                         ASSERT_TRUE(session.get_checkpoint());
                         EXPECT_EQ(session.get_checkpoint()->to_dict().values.at("rate"), 0.5);
                       }).second;
  EXPECT_EQ(result.checkpoint->to_dict().values.at("rate"), 0.5);
}

TEST(TrainRow, EqualSteps) {
  // 7 samples in steps of 2 per worker: every rank has as many steps, every sample comes once, and what is left empty
  // has one sample of weight 0.
  auto options = named("equal");
  options.datasets = {{"train", numbers(7)}};
  run({shared_folder(), {}, options}, [](Session& session, const Config&) {
    std::int64_t steps = 0;
    double weights = 0;
    std::vector<std::int64_t> mine;
    for (const auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 2})) {
      ++steps;
      weights += batch.weight();
      EXPECT_GE(batch["x"].size(0), 1) << "nothing has to be a special case";
      EXPECT_EQ(batch.weight() == 0, batch.size() == 0);
      for (const auto row : rows_of(batch)) mine.push_back(row);
    }
    EXPECT_EQ(of_all(session, mine), from_zero(7));
    const std::int64_t per_step = 2 * session.world_size();
    EXPECT_EQ(steps, (7 + per_step - 1) / per_step);
    const auto& all = session.communicator();
    EXPECT_EQ(all.all_reduce(steps, ReduceOp::max), all.all_reduce(steps, ReduceOp::min));
    EXPECT_DOUBLE_EQ(all.all_reduce(weights, ReduceOp::sum), static_cast<double>(steps * session.world_size()));
  });
}

TEST(TrainRow, BatchNormStatistics) {
  run({shared_folder(), {}, named("statistics")}, [](Session& session, const Config&) {
    torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(1).momentum(1.0));
    session.prepare_model(norm);
    const auto rank = static_cast<float>(session.world_rank());
    const auto mean = static_cast<float>(session.world_size() - 1) / 2;
    norm->forward(torch::tensor({{rank - 1}, {rank + 1}}));
    session.report({{"a", 1}}, session.state({{"norm", norm}}));
    const auto saved = session.get_checkpoint()->to_dict();
    EXPECT_FLOAT_EQ(saved.tensors.at("norm/running_mean").item<float>(), mean);
    norm->forward(torch::tensor({{rank - 1}, {rank + 1}}));
    EXPECT_FLOAT_EQ(norm->running_mean.item<float>(), rank) << "its own while it trains";
    const auto scope = session.evaluation(norm);
    EXPECT_FLOAT_EQ(norm->running_mean.item<float>(), mean);
    EXPECT_FALSE(norm->is_training());
  });
}

TEST(TrainRow, UnusedParameter) {
  run({shared_folder(), {}, named("unused")}, [](Session& session, const Config&) {
    torch::nn::Sequential net(torch::nn::Linear(1, 1), torch::nn::Linear(1, 1));
    session.prepare_model(net);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
    const auto unused = net[1]->as<torch::nn::Linear>()->weight;
    const auto before = unused.detach().clone();
    net[0]->as<torch::nn::Linear>()->forward(torch::ones({1, 1})).sum().backward();
    optimizer.step();
    EXPECT_FALSE(unused.grad().defined());
    EXPECT_TRUE(unused.equal(before)) << "neither momentum nor decay has moved it";
  });
}

TEST(TrainRow, History) {
  const auto storage = shared_folder();
  const auto rows = [&](const std::string& name) {
    std::vector<double> values;
    std::ifstream lines(storage / name / "result.json");
    for (std::string text; std::getline(lines, text);) values.push_back(Json::parse(text).at("value"));
    return values;
  };
  double value = 0;
  const auto train = [&](double fails) {
    return [&value, fails](Session& session, const Config&) {
      auto state = session.state({{"value", value}});
      value = 0;
      state.restore();
      while (value < 6) {
        ++value;
        if (static_cast<int>(value) % 2 == 0)
          session.report({{"value", value}}, state);
        else
          session.report({{"value", value}});  // no checkpoint: done again by who goes on
        if (value == fails) throw std::runtime_error("after a row that is not in a checkpoint");
      }
    };
  };
  EXPECT_EQ(run({storage, {}, named("cut")}, train(3)).first, 1);
  EXPECT_EQ(rows("cut"), (std::vector<double>{1, 2, 3}));
  EXPECT_EQ(run({storage, {}, named("cut")}, train(0)).first, 0);
  EXPECT_EQ(rows("cut"), (std::vector<double>{1, 2, 3, 4, 5, 6})) << "as of an undisturbed run";

  // A damaged checkpoint is quarantined, and its number is not used again.
  EXPECT_EQ(run({storage, {}, named("broken")}, train(5)).first, 1);
  const auto newest = list_checkpoints(storage / "broken").back();
  EXPECT_EQ(newest.index, 1);
  world().barrier();
  if (world().rank() == 0) std::filesystem::resize_file(newest.path / "state.h5", 10);
  world().barrier();
  EXPECT_EQ(run({storage, {}, named("broken")}, train(0)).first, 0);
  EXPECT_TRUE(std::filesystem::exists(newest.path.string() + ".damaged"));
  std::vector<int> indices;
  for (const auto& checkpoint : list_checkpoints(storage / "broken"))
    if (checkpoint.problem.empty()) indices.push_back(checkpoint.index);
  EXPECT_EQ(indices, (std::vector{0, 2, 3}));
}

}  // namespace
}  // namespace muster::training_test
