// RaySGD's operator API, row by row.
#include "muster/operator.hpp"

#include "muster/data_loader.hpp"
#include "muster/muster.hpp"
#include "operators/results.hpp"
#include "rows/operator_program.hpp"
#include "support/io_errors.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster::operator_test {
namespace {

using test::all_ranks;
using test::error_of;
using test::expect_error;
using test::has;
using test::line;
using test::on_all;
using test::Pairs;
using test::program;
using test::world;

std::vector<std::string> keys(const Json& results) {
  std::vector<std::string> all;
  for (const auto& [key, value] : results.items()) all.push_back(key);
  return all;
}

std::vector<double> weights_of(const torch::nn::Module& module) {
  std::vector<double> all;
  for (const auto& parameter : module.parameters())
    for (std::int64_t i = 0; i < parameter.numel(); ++i) all.push_back(parameter.flatten()[i].item<double>());
  return all;
}

/// y = 3x − 1.
struct Line : TrainingOperator {
  torch::nn::Linear net{nullptr};
  std::shared_ptr<PreparedOptimizer<torch::optim::SGD>> optimizer;
  void setup(const Config& config) override {
    torch::nn::Linear made(1, 1);
    std::tie(net, optimizer) = register_training(Components{
        .models = made,
        .optimizers =
            torch::optim::SGD(made->parameters(), torch::optim::SGDOptions(config.value("lr", 0.1)).momentum(0.9)),
        .criterion = torch::nn::MSELoss(),
        .optimizer_options = {.fuse = config.value("fuse", false) ? Fuse::always : Fuse::never}});
    register_data({line(), {.batch_size = config.value("batch_size", 4), .shuffle = config.value("shuffle", false)}},
                  OperatorLoader(line(), {.batch_size = 8}));
  }
};

/// Counts what it is called with, and trains nothing.
struct Counting : TrainingOperator {
  std::vector<double> seen;  // the first feature of each sample
  std::vector<BatchInfo> infos;
  void setup(const Config& config) override {
    const auto x = at::arange(config.value("samples", 12 * session().world_size()), at::kFloat);
    const auto data = Dataset::from_tensors({{"x", x}, {"y", x}});
    register_data({data, {.batch_size = 4}}, OperatorLoader(data, {.batch_size = 4}));
  }
  Metrics train_batch(Batch& batch, const BatchInfo& info) override {
    infos.push_back(info);
    for (std::int64_t i = 0; i < batch.size(); ++i) seen.push_back(batch["x"][i].item<double>());
    return {{"m", static_cast<double>(info.batch_idx)}, {"num_samples", batch.size()}};
  }
  Metrics validate_batch(Batch& batch, const BatchInfo& info) override { return train_batch(batch, info); }
};

TEST(OperatorRow, TrainerAndItsOptions) {
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, {.initialization_hook = [] {},
                                           .config = {{"lr", 0.05}},
                                           .num_workers = launch.size(),
                                           .num_cpus_per_worker = 1,
                                           .use_gpu = UseGpu::never,
                                           .backend = "mpi",
                                           .wrap_ddp = true,
                                           .ddp_args = {.bucket_bytes = 1 << 20},
                                           .timeout = std::chrono::seconds(600),
                                           .use_fp16 = false,
                                           .use_tqdm = false,
                                           .add_dist_sampler = true,
                                           .scheduler_step_freq = SchedulerStepFreq::manual});
    EXPECT_EQ(trainer.get_local_operator().config().at("lr"), 0.05);
    EXPECT_EQ(at::get_num_threads(), 1);
    EXPECT_EQ(trainer.get_local_operator().session().world_size(), launch.size());
  });
  on_all([](Launch& launch) {
    expect_error("mpirun -n", [&] { OperatorTrainer<Line>(launch, {.num_workers = launch.size() + 1}); });
    expect_error("pigeon", [&] { OperatorTrainer<Line>(launch, {.backend = "carrier pigeon"}); });
  });
}

TEST(OperatorRow, NumWorkersIsOneAndTheOthersGetTheSameResults) {
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch);
    const auto results = trainer.train();
    EXPECT_EQ(results.at("num_samples"), 46);
    EXPECT_EQ(results.at("batch_count"), 12);
    const auto state = trainer.state_dict();
    EXPECT_EQ(state.tensors.at("model/weight").numel(), 1);
    EXPECT_EQ(trainer.apply_all_workers([] { return 1; }).size(), 1u);
    for (const auto& theirs : world().all_gather(results.dump())) EXPECT_EQ(theirs, results.dump());
    const auto weight = std::to_string(state.tensors.at("model/weight").item<float>());
    for (const auto& theirs : world().all_gather(weight)) EXPECT_EQ(theirs, weight);
    if (launch.rank() == 0)
      EXPECT_NO_THROW(trainer.get_local_operator());
    else
      EXPECT_THROW(trainer.get_local_operator(), Error);
  });
}

// main is SPMD: a part that stands for a driver's is rank 0's.
TEST(OperatorRow, ADriversPartIsRankZeros) {
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch));
    std::vector<double> losses;
    for (int epoch = 0; epoch < 3; ++epoch) {
      const auto results = trainer.train();
      if (launch.rank() == 0) losses.push_back(results.at("train_loss"));
    }
    trainer.shutdown();
    EXPECT_EQ(losses.size(), launch.rank() == 0 ? 3u : 0u);
  });
}

TEST(Operators, ARangeOfWorkersTakesWhatIsThere) {
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, {.num_workers = {1, 64}});
    EXPECT_EQ(trainer.apply_all_workers([] { return 1; }).size(), static_cast<std::size_t>(launch.size()));
    expect_error("mpirun -n", [&] {
      OperatorTrainer<Line>(launch, {.num_workers = {launch.size() + 1, launch.size() + 2}});
    });
  });
}

TEST(OperatorRow, Train) {
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch));
    const double first = trainer.train().at("train_loss");
    Json results;
    for (int i = 0; i < 10; ++i) results = trainer.train();
    EXPECT_LT(results.at("train_loss").get<double>(), first / 4);
    EXPECT_EQ(results.at("epoch"), 11);
    expect_error("max_retries", [&] { trainer.train({.max_retries = -1}); });
    if (launch.size() == 1) return;
    expect_error("the options of train() on all ranks: num_steps is 1 on rank 0 and 2 on rank 1",
                 [&] { trainer.train({.num_steps = 1 + launch.rank()}); });
    expect_error("the options of validate() on all ranks: reduce_results is true on rank 0 and false on rank 1",
                 [&] { trainer.validate({.reduce_results = launch.rank() == 0}); });
    EXPECT_EQ(trainer.train().at("epoch"), 12);
    expect_error("the options of the operator's trainer on all ranks: wrap_ddp is true on rank 0 and false on rank 1",
                 [&] { OperatorTrainer<Line>(launch, {.wrap_ddp = launch.rank() == 0}); });
  });
}

struct Watching : Line {
  int batches = 0;
  Metrics validate_batch(Batch& batch, const BatchInfo& info) override {
    ++batches;
    EXPECT_FALSE(net->is_training());
    EXPECT_FALSE(at::GradMode::is_enabled());
    return Line::validate_batch(batch, info);
  }
};

TEST(OperatorRow, Validate) {
  on_all([](Launch& launch) {
    OperatorTrainer<Watching> trainer(launch, all_ranks(launch));
    trainer.train();
    EXPECT_EQ(trainer.validate().at("batch_count"), trainer.get_local_operator().batches);
  });
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch));
    const auto& net = trainer.get_local_operator().net;
    const double untrained = trainer.validate().at("val_loss");
    const auto before = weights_of(*net);
    for (int i = 0; i < 10; ++i) trainer.train();
    EXPECT_NE(weights_of(*net), before);
    const auto trained = weights_of(*net);
    const auto results = trainer.validate();
    EXPECT_LT(results.at("val_loss").get<double>(), untrained);
    EXPECT_EQ(results.at("num_samples"), 46);
    EXPECT_EQ(weights_of(*net), trained);
    EXPECT_TRUE(net->is_training());
    EXPECT_EQ(trainer.validate({.num_steps = 1}).at("batch_count"), 1);
    EXPECT_EQ(trainer.validate({.num_steps = 1}), trainer.validate({.num_steps = 1})) << "from the beginning each time";
  });
}

TEST(OperatorRow, ApplyAllWorkersAndOperators) {
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch));
    Json expected = Json::array();
    for (int rank = 0; rank < launch.size(); ++rank) expected.push_back({{"rank", rank}});
    EXPECT_EQ(trainer.apply_all_workers([&] { return Json{{"rank", launch.rank()}}; }), expected);
    EXPECT_EQ(trainer.apply_all_operators([](Line& line) { return Json{{"rank", line.world_rank()}}; }), expected);
  });
}

struct Plateau : TrainingOperator {
  double lr() { return optimizer->param_groups().front().options().get_lr(); }
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  void setup(const Config&) override {
    torch::nn::Linear net(1, 1);
    std::tie(std::ignore, optimizer, std::ignore) =
        register_training(Components{.models = net,
                                     .optimizers = torch::optim::SGD(net->parameters(), 0.5),
                                     .criterion = torch::nn::MSELoss(),
                                     .schedulers = [](auto& optimizer) {
                                       using Scheduler = torch::optim::ReduceLROnPlateauScheduler;
                                       return Scheduler(optimizer, Scheduler::min, 0.5, /*patience=*/0);
                                     }});
    register_data({line(), {.batch_size = 8}});
  }
};

TEST(OperatorRow, UpdateScheduler) {
  on_all([](Launch& launch) {
    auto options = all_ranks(launch);
    options.scheduler_step_freq = SchedulerStepFreq::epoch;
    OperatorTrainer<Plateau> trainer(launch, options);
    auto& its = trainer.get_local_operator();
    trainer.train();
    trainer.update_scheduler(1);
    EXPECT_EQ(its.lr(), 0.5);
    trainer.update_scheduler(2);
    EXPECT_EQ(its.lr(), 0.25) << "it was no better";
  });
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch));
    expect_error("no registered scheduler", [&] { trainer.update_scheduler(1); });
  });
}

TEST(Operators, TheMetricOfASchedulerIsTheFirstRanks) {
  on_all([](Launch& launch) {
    auto options = all_ranks(launch);
    options.scheduler_step_freq = SchedulerStepFreq::manual;
    OperatorTrainer<Plateau> trainer(launch, options);
    for (int i = 0; i < 3; ++i) trainer.update_scheduler(launch.rank() == 0 ? i : -i);  // what a driver has measured
    EXPECT_EQ(trainer.get_local_operator().lr(), 0.125);
  });
}

TEST(OperatorRow, GetModelAndLocalOperator) {
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch));
    trainer.train();
    const auto model = trainer.get_model<torch::nn::LinearImpl>();
    EXPECT_EQ(model.get(), trainer.get_local_operator().net.get());
    const auto copy = trainer.get_model(/*to_cpu=*/true);
    EXPECT_NE(copy, model);
    EXPECT_EQ(weights_of(*copy), weights_of(*model));
    EXPECT_THROW(trainer.get_model<torch::nn::Conv2dImpl>(), Error);
    EXPECT_THROW(trainer.get_model(false, 1), Error);
    trainer.shutdown();
    EXPECT_EQ(trainer.get_model(), model) << "after the end too";
  });
}

TEST(OperatorRow, StateDictAndLoadStateDict) {
  for (const bool fuse : {false, true})
    on_all([&](Launch& launch) {
      OperatorTrainer<Line> trainer(launch, all_ranks(launch, {{"fuse", fuse}}));
      trainer.train();
      const auto saved = trainer.state_dict();
      const auto after_two = trainer.train();
      EXPECT_NE(saved.tensors.at("model/weight").item<float>(),
                trainer.state_dict().tensors.at("model/weight").item<float>())
          << "a copy, not the model's own";
      trainer.load_state_dict(saved);
      EXPECT_EQ(trainer.train(), after_two) << "epoch, weights and momentum are back";
      auto wrong = saved;
      wrong.tensors["model/weight"] = at::zeros({2, 1});
      const auto before = weights_of(*trainer.get_model());
      expect_error("model/weight", [&] { trainer.load_state_dict(wrong); });
      EXPECT_EQ(weights_of(*trainer.get_model()), before);
    });
}

TEST(OperatorRow, SaveAndLoad) {
  const auto folder = test::shared_folder() / "line";
  on_all([&](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch));
    trainer.train();
    trainer.save(folder);
    const auto first = trainer.state_dict();
    trainer.train();
    trainer.save(folder);  // in its place
    const auto second = weights_of(*trainer.get_model());
    trainer.load_state_dict(first);
    trainer.load(folder);
    EXPECT_EQ(weights_of(*trainer.get_model()), second);
    torch::nn::Linear elsewhere(1, 1);
    Checkpoint::from_directory(folder).load("model", elsewhere);
    EXPECT_EQ(weights_of(*elsewhere), second);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.parent_path()), {}), 1) << "nothing beside it";
    expect_error("nowhere", [&] { trainer.load(folder / "nowhere"); });
  });
  on_all([&](Launch& launch) {
    OperatorTrainer<Line> another(launch, all_ranks(launch));
    another.load(folder);
    EXPECT_EQ(another.train().at("epoch"), 3);
    std::ofstream(folder / "notes.txt") << "the user's";
    launch.communicator().barrier();
    expect_error("holds \"notes.txt\" too", [&] { another.save(folder); });
    EXPECT_TRUE(std::filesystem::exists(folder / "notes.txt"));
  });
}

TEST(OperatorRow, ASaveThatFailsLeavesWhatIsThere) {
  const auto folder = test::shared_folder();
  namespace fs = std::filesystem;
  if (test::world().rank() == 0) {
    fs::create_directories(folder / "thesis");
    std::ofstream(folder / "thesis" / "chapter") << "years";
    fs::create_directory(folder / "empty");
    std::ofstream(folder / "file") << "a file";
    std::ofstream(folder / "empty_file") << "";
    EXPECT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
    fs::create_symlink("nowhere", folder / "dangling");
    fs::create_symlink("empty", folder / "link");
  }
  test::world().barrier();
  for (const auto* name : {"thesis", "file", "empty_file", "pipe", "."})
    on_all([&](Launch& launch) {
      OperatorTrainer<Line> trainer(launch, all_ranks(launch));
      const auto text = error_of([&] { trainer.save(folder / name); });
      EXPECT_TRUE(has(text, "it exists and is not a checkpoint")) << text;
      EXPECT_TRUE(fs::exists(folder / "thesis" / "chapter"));
      EXPECT_TRUE(fs::exists(folder / "file"));
      EXPECT_TRUE(fs::is_regular_file(folder / "empty_file"));
      EXPECT_TRUE(fs::is_fifo(folder / "pipe"));
    });
  on_all([&](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch));
    trainer.save(folder / "empty");
    trainer.load(folder / "empty");
    const auto before = weights_of(*trainer.get_model());
    for (const auto* name : {"dangling", "link"}) {
      expect_error("it is a symbolic link", [&] { trainer.save(folder / name); });
      EXPECT_TRUE(fs::is_symlink(folder / name));
    }
    expect_error("looking at a path: no name is given", [&] { trainer.save({}); });
    expect_error("looking at a path: no name is given", [&] { trainer.load({}); });
    {
      const test::IoError full("open", "/.empty.saving", ENOSPC);
      expect_error("No space left", [&] { trainer.save(folder / "empty"); });
    }
    EXPECT_FALSE(fs::exists(folder / ".empty.saving"));
    torch::nn::Linear elsewhere(1, 1);
    Checkpoint::from_directory(folder / "empty").load("model", elsewhere);
    EXPECT_EQ(weights_of(*elsewhere), before);
  });
}

TEST(OperatorRow, Shutdown) {
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch));
    trainer.train();
    trainer.shutdown();
    trainer.shutdown();
    expect_error("shut down", [&] { trainer.train(); });
  });
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch));
    trainer.train();
    trainer.shutdown(/*force=*/true);
    EXPECT_THROW(trainer.validate(), Error);
  });
  on_all([](Launch& launch) { OperatorTrainer<Line>(launch, all_ranks(launch)).train(); });
}

struct NoModel : TrainingOperator {
  void setup(const Config&) override { register_data({line()}, OperatorLoader(line())); }
};
struct Nothing : TrainingOperator {
  void setup(const Config&) override {}
};
struct NoData : TrainingOperator {
  void setup(const Config&) override {
    torch::nn::Linear net(1, 1);
    register_training(Components{.models = net, .optimizers = torch::optim::SGD(net->parameters(), 0.1)});
  }
};

TEST(OperatorRow, SetupMustBeOverriddenAndRegister) {
  static_assert(std::is_abstract_v<TrainingOperator>);
  on_all([](Launch& launch) {
    expect_error("the operator has no model. Call register_training() in its setup()",
                 [&] { OperatorTrainer<NoModel>(launch, all_ranks(launch)).train(); });
    expect_error("no model", [&] { OperatorTrainer<NoModel>(launch, all_ranks(launch)).validate(); });
    for (const bool trains : {true, false})
      expect_error("no model. Call register_training() and register_data() in its setup()", [&] {
        OperatorTrainer<Nothing> trainer(launch, all_ranks(launch));
        trains ? trainer.train() : trainer.validate();
      });
    expect_error("no train_loader. Call register_data() with one in its setup()",
                 [&] { OperatorTrainer<NoData>(launch, all_ranks(launch)).train(); });
    expect_error("validation_loader", [&] { OperatorTrainer<NoData>(launch, all_ranks(launch)).validate(); });
  });
}

struct NoCriterion : NoData {
  void setup(const Config& config) override {
    NoData::setup(config);
    register_data({line(), {.batch_size = 8}});
  }
};
struct NoBatches : TrainingOperator {
  void setup(const Config&) override {
    torch::nn::Linear net(1, 1);
    register_training(Components{
        .models = net, .optimizers = torch::optim::SGD(net->parameters(), 0.1), .criterion = torch::nn::MSELoss()});
    register_data({line(), {.batch_size = 1000, .drop_last = true}});
  }
};
struct NoOptimizer : TrainingOperator {
  void setup(const Config&) override {
    register_training(
        Components{.models = torch::nn::Linear(1, 1), .optimizers = std::tuple<>(), .criterion = torch::nn::MSELoss()});
    register_data({line(), {.batch_size = 8}});
  }
};
struct Twice : NoData {
  void setup(const Config& config) override {
    NoData::setup(config);
    NoData::setup(config);
  }
};
struct WithApex : TrainingOperator {
  void setup(const Config&) override {
    torch::nn::Linear net(1, 1);
    register_training(Components{.models = net,
                                 .optimizers = torch::optim::SGD(net->parameters(), 0.1),
                                 .criterion = nullptr,
                                 .schedulers = std::tuple<>(),
                                 .apex_args = {{"opt_level", "O1"}}});
  }
};
struct UnnamedStream : NoCriterion {
  void setup(const Config& config) override {
    NoData::setup(config);
    register_data({Dataset::from_stream([](const StreamShard&) { return [] { return std::optional<StreamRows>(); }; }),
                   {.batch_size = 8},
                   {.features = {"x"}}});
  }
};

TEST(OperatorErrors, AStepOfATrialGivesNamesAndValues) {
  on_all([](Launch& launch) {
    const auto trial = OperatorTrainer<Line>::as_trainable(
        all_ranks(launch), 1, [](OperatorTrainer<Line>&, std::int64_t) { return Json(3); });
    expect_error("reporting a step of a trial: its return value is not a JSON object", [&] {
      if (const auto result = trial(launch, Config::object()); result.error) throw *result.error;
    });
  });
}

TEST(OperatorErrors, RegistrationsThatCannotBeAreSaid) {
  on_all([](Launch& launch) {
    const auto refusal = [&]<class Operator>(std::type_identity<Operator>) {
      return error_of([&] { OperatorTrainer<Operator>(launch, all_ranks(launch)).train(); });
    };
    EXPECT_TRUE(has(refusal(std::type_identity<NoCriterion>()), "no criterion was registered. Override train_batch()"));
    EXPECT_TRUE(has(refusal(std::type_identity<NoOptimizer>()), "no optimizer was registered. Override train_batch()"));
    EXPECT_TRUE(has(refusal(std::type_identity<NoBatches>()), "a pass over the data has no batches"));
    EXPECT_TRUE(has(refusal(std::type_identity<Twice>()), "something is registered already"));
    EXPECT_TRUE(has(refusal(std::type_identity<WithApex>()), "apex_args are for Apex, which libtorch does not have"));
    EXPECT_TRUE(
        has(refusal(std::type_identity<UnnamedStream>()), "a stream's columns are not known before it is read"));
  });
}

struct Gan : TrainingOperator {
  torch::nn::Linear generator{nullptr}, discriminator{nullptr};
  std::shared_ptr<torch::optim::Optimizer> of_generator, of_discriminator;
  void setup(const Config&) override {
    torch::nn::Linear g(1, 1), d(1, 1);
    auto registered = register_training(Components{
        .models = std::tuple(g, d),
        .optimizers = std::tuple(torch::optim::Adam(g->parameters(), 0.05), torch::optim::SGD(d->parameters(), 0.1)),
        .criterion = torch::nn::BCEWithLogitsLoss()});
    static_assert(std::is_same_v<std::tuple_element_t<2, decltype(registered)>,
                                 std::shared_ptr<PreparedOptimizer<torch::optim::Adam>>>);
    std::tie(generator, discriminator, of_generator, of_discriminator) = registered;
    register_data({line(), {.batch_size = 8}});
  }
};
struct TrainedGan : Gan {
  Metrics train_batch(Batch& batch, const BatchInfo&) override {
    const torch::nn::BCEWithLogitsLoss bce;
    const auto rows = batch["y"].size(0);
    const auto made = generator->forward(at::randn({rows, 1}));
    of_discriminator->zero_grad();
    const auto loss_d =
        torch::binary_cross_entropy_with_logits(discriminator->forward(batch["y"]), at::ones({rows, 1})) +
        torch::binary_cross_entropy_with_logits(discriminator->forward(made.detach()), at::zeros({rows, 1}));
    loss_d.backward();
    of_discriminator->step();
    of_generator->zero_grad();
    const auto loss_g = torch::binary_cross_entropy_with_logits(discriminator->forward(made), at::ones({rows, 1}));
    loss_g.backward();
    of_generator->step();
    return {{"loss_d", loss_d}, {"loss_g", loss_g}, {"num_samples", batch.size()}};
  }
};

TEST(OperatorRow, RegisterSeveralModels) {
  on_all([](Launch& launch) {
    OperatorTrainer<TrainedGan> trainer(launch, all_ranks(launch));
    const auto results = trainer.train();
    EXPECT_EQ(keys(results), (std::vector<std::string>{"batch_count", "epoch", "last_loss_d", "last_loss_g", "loss_d",
                                                       "loss_g", "num_samples"}));
    const auto state = trainer.state_dict();
    EXPECT_TRUE(state.values.contains("model_0") && state.values.contains("optimizer_1"));
    EXPECT_EQ(trainer.get_model(false, 1).get(), trainer.get_local_operator().discriminator.get());
    for (const auto& theirs : world().all_gather(Json(weights_of(*trainer.get_model())).dump()))
      EXPECT_EQ(theirs, Json(weights_of(*trainer.get_model())).dump());
  });
  on_all([](Launch& launch) {
    OperatorTrainer<Gan> trainer(launch, all_ranks(launch));
    expect_error("2 models and 2 optimizers", [&] { trainer.train(); });
  });
}

struct Loaders : Counting {
  void setup(const Config& config) override {
    if (config.at("kind") == "torch")
      register_data({Pairs(), DataLoaderOptions{.batch_size = 4}}, OperatorLoader(Pairs(), DataLoaderOptions{}));
    else
      register_data(OperatorLoader(
          prepare_data_loader(session(), Pairs().map(torch::data::transforms::Stack<>()), {.batch_size = 4})));
  }
  Metrics train_batch(Batch& batch, const BatchInfo&) override {
    EXPECT_EQ((batch.begin() + 0)->first, "data");
    EXPECT_TRUE(at::equal(batch["target"], 2 * batch["data"]));
    for (std::int64_t i = 0; i < batch.size(); ++i) seen.push_back(batch["data"][i].item<double>());
    return {{"sum", batch["target"].sum() / batch["target"].size(0)}, {"num_samples", batch.size()}};
  }
};

TEST(OperatorRow, RegisterData) {
  for (const auto* kind : {"torch", "prepared"})
    on_all([&](Launch& launch) {
      OperatorTrainer<Loaders> trainer(launch, all_ranks(launch, {{"kind", kind}}));
      const auto results = trainer.train();
      EXPECT_EQ(results.at("num_samples"), 46) << kind;
      EXPECT_NEAR(results.at("sum").get<double>(), 45, 1e-9) << kind;
      EXPECT_EQ(trainer.train().at("num_samples"), 46);
      if (kind == std::string("torch")) {
        EXPECT_EQ(trainer.validate().at("num_samples"), 46);
      }
    });
}

struct Overriding : Counting {
  Metrics train_epoch(OperatorBatches& batches, const EpochInfo& info) override {
    AverageMeterCollection meters;
    BatchInfo batch_info{info};
    for (auto& batch : batches) {
      meters.update(train_batch(batch, batch_info));
      ++global_step;
      if (++batch_info.batch_idx == 2) break;
    }
    auto results = meters.summary();
    results.insert_or_assign("said", Metric("epoch " + std::to_string(info.epoch_idx)));
    return results;
  }
  Metrics validate(OperatorBatches& batches, const EpochInfo&) override {
    EXPECT_FALSE(at::GradMode::is_enabled());
    std::int64_t count = 0;
    for ([[maybe_unused]] auto& batch : batches) ++count;
    return {{"count", count}};
  }
};

TEST(OperatorRow, EpochsAndBatchesMayBeOverridden) {
  on_all([](Launch& launch) {
    OperatorTrainer<Overriding> trainer(launch, all_ranks(launch));
    auto results = trainer.train();
    EXPECT_EQ(results.at("batch_count"), 2);
    EXPECT_EQ(results.at("said"), "epoch 0");
    results = trainer.train();
    EXPECT_EQ(results.at("batch_count"), 1) << "the rest of a pass that was left";
    EXPECT_EQ(trainer.validate(), (Json{{"count", 3}}));
  });
}

struct Remembering : Line {
  std::int64_t seen = 0;
  Metrics train_batch(Batch& batch, const BatchInfo& info) override {
    ++seen;
    return Line::train_batch(batch, info);
  }
  StateDict state_dict() override { return {.tensors = {{"t", at::full({1}, seen)}}, .values = {{"seen", seen}}}; }
  void load_state_dict(const StateDict& state) override {
    seen = state.values.at("seen");
    EXPECT_EQ(state.tensors.at("t").item<std::int64_t>(), seen);
  }
};

TEST(OperatorRow, AnOperatorsOwnState) {
  on_all([](Launch& launch) {
    OperatorTrainer<Remembering> trainer(launch, all_ranks(launch));
    trainer.train({.num_steps = 3});
    const auto state = trainer.state_dict();
    EXPECT_EQ(state.values.at("operator").at("seen"), 3);
    trainer.train({.num_steps = 2});
    trainer.load_state_dict(state);
    EXPECT_EQ(trainer.get_local_operator().seen, 3);
    EXPECT_EQ(trainer.get_local_operator().global_step, 3);
  });
}

TEST(OperatorRow, FromCreators) {
  on_all([](Launch& launch) {
    auto options = all_ranks(launch, {{"lr", 0.1}});
    options.scheduler_step_freq = SchedulerStepFreq::epoch;
    OperatorTrainer<> trainer(
        launch,
        TrainingOperator::from_creators(
            [](const Config&) { return torch::nn::Linear(1, 1); },
            [](torch::nn::Linear& net, const Config& config) {
              return torch::optim::SGD(net->parameters(), config.at("lr").get<double>());
            },
            [](const Config&) {
              return std::pair(OperatorLoader(line(), {.batch_size = 4}), OperatorLoader(line(), {.batch_size = 8}));
            },
            [](const Config&) { return torch::nn::MSELoss(); },
            [](torch::optim::Optimizer& optimizer, const Config&) { return torch::optim::StepLR(optimizer, 2, 0.5); }),
        options);
    const double first = trainer.train().at("train_loss");
    for (int i = 0; i < 5; ++i) trainer.train();
    EXPECT_LT(trainer.validate().at("val_loss").get<double>(), first);
    EXPECT_TRUE(trainer.state_dict().values.contains("scheduler"));
  });
  on_all([](Launch& launch) {
    const auto make = TrainingOperator::from_creators(
        [](const Config&) { return std::tuple(torch::nn::Linear(1, 1), torch::nn::Linear(1, 1)); },
        [](auto& models, const Config&) { return torch::optim::SGD(std::get<0>(models)->parameters(), 0.1); },
        [](const Config&) { return OperatorLoader(line()); });
    OperatorTrainer<> trainer(launch, make, all_ranks(launch));
    EXPECT_NE(trainer.get_model(false, 1), nullptr);
  });
}

TEST(OperatorRow, Properties) {
  on_all([](Launch& launch) {
    auto options = all_ranks(launch, {{"lr", 0.2}});
    options.scheduler_step_freq = SchedulerStepFreq::batch;
    options.use_gpu = UseGpu::never;
    OperatorTrainer<Line> trainer(launch, options);
    auto& its = trainer.get_local_operator();
    EXPECT_TRUE(its.device().is_cpu());
    EXPECT_EQ(its.config().at("lr"), 0.2);
    EXPECT_EQ(its.world_rank(), launch.rank());
    EXPECT_EQ(its.local_rank(), launch.communicator().topology().local_rank);
    EXPECT_FALSE(its.use_gpu() || its.use_fp16() || its.use_tqdm());
    EXPECT_EQ(its.scheduler_step_freq(), SchedulerStepFreq::batch);
    EXPECT_EQ(its.global_step, 0);
    const auto results = trainer.train();
    EXPECT_EQ(its.global_step, results.at("batch_count"));
    EXPECT_TRUE(its.timers.stats().empty());
    EXPECT_THROW(Line().device(), Error) << "before it belongs to a trainer";
  });
}

/// What rank 0 shows of a call of train() and one of validate().
std::string shown_with(bool use_tqdm, const std::string& progress) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(program({"--progress", progress},
                    [&](Launch& launch) {
                      auto options = all_ranks(launch);
                      options.use_tqdm = use_tqdm;
                      OperatorTrainer<Line> trainer(launch, options);
                      EXPECT_EQ(trainer.get_local_operator().use_tqdm(), use_tqdm);
                      trainer.train();
                      trainer.validate();
                    }),
            0);
  return testing::internal::GetCapturedStderr();
}

TEST(OperatorRow, UseTqdmShowsAProgressLine) {
  for (const bool wanted : {true, false}) {
    const auto shown = shown_with(wanted, "bar");
    EXPECT_EQ(shown.find("train_loss") != std::string::npos, wanted && world().rank() == 0) << shown;
  }
}

TEST(OperatorRow, UseTqdmShowsASummaryAtTheEnd) {
  for (const bool wanted : {true, false}) {
    const auto shown = shown_with(wanted, "plain");
    EXPECT_EQ(shown.find("finished: 2 reports") != std::string::npos, wanted && world().rank() == 0) << shown;
  }
}

TEST(OperatorRow, AverageMeterCollection) {
  AverageMeterCollection meters;
  meters.update({{"m", 1.0}, {"num_samples", 3}});
  meters.update({{"m", 5.0}, {"text", "a"}});  // weighs 1
  meters.update({{"m", 100.0}, {"num_samples", 0}});
  meters.update({{"m", 2.0}}, 4);
  const auto all = meters.summary();
  EXPECT_EQ(all.at("num_samples").value(), 8);
  EXPECT_EQ(all.at("batch_count").value(), 4);
  EXPECT_DOUBLE_EQ(all.at("m").value().get<double>(), (3 * 1.0 + 5.0 + 4 * 2.0) / 8);
  EXPECT_EQ(all.at("m").weight(), 8);
  EXPECT_EQ(all.at("last_m").value(), 2.0);
  EXPECT_EQ(all.at("last_m").weight(), 4);
  EXPECT_EQ(all.at("text").value(), "a");
  EXPECT_EQ(all.at("last_text").value(), "a");
  meters.update({{"m", 7.0}, {"num_samples", 0}});  // of the last step this worker has had nothing
  EXPECT_EQ(meters.summary().at("last_m").value(), 2.0);
  EXPECT_EQ(meters.summary().at("last_m").weight(), 0) << "the others' is the last";
  using namespace detail::operators;
  AverageMeterCollection others;
  others.update({{"m", 4.0}}, 2);
  const auto of_all = [&] {
    return reduce_over_workers({to_weighted_json(meters.summary()), to_weighted_json(others.summary())});
  };
  EXPECT_EQ(of_all().at("last_m"), 4.0);
  others.update({{"m", 9.0}}, 0);
  EXPECT_EQ(of_all().at("last_m"), 3.0) << "an empty batch everywhere is nobody's last";
  EXPECT_EQ(of_all().at("m"), (16.0 + 8.0) / 10);
  AverageMeterCollection empty;
  empty.update({{"m", std::nan("")}}, 0);
  EXPECT_TRUE(reduce_over_workers({to_weighted_json(empty.summary())}).at("last_m").is_null());
}

/// Of each batch on its own: F1 over its samples, perplexity over its tokens, and a mean over its tokens.
Metrics of_batch(const at::Tensor& prediction, const at::Tensor& target, double loss, std::int64_t tokens) {
  F1 f1({.num_classes = 2});
  f1.add(prediction, target);
  Perplexity perplexity;
  perplexity.add(at::scalar_tensor(loss), tokens);
  Mean per_token;
  per_token.add(loss, tokens);
  return {{"f1", f1}, {"perplexity", perplexity}, {"per_token", per_token}};
}

TEST(Operators, AMetricOfABatchCountsByItsOwnSamples) {
  const auto prediction = at::tensor({0, 0, 1, 1, 1, 0, 1, 0}), target = at::tensor({0, 0, 0, 1, 1, 1, 0, 0});
  F1 expected({.num_classes = 2});
  expected.add(prediction, target);
  using namespace detail::operators;
  for (const std::size_t workers : {1, 2}) {
    std::vector<AverageMeterCollection> meters(workers);
    for (std::int64_t batch = 0; batch < 4; ++batch)  // in the first one is no sample of class 1
      meters[static_cast<std::size_t>(batch) % workers].update(
          of_batch(prediction.narrow(0, 2 * batch, 2), target.narrow(0, 2 * batch, 2), batch == 3 ? 5.0 : 1.0,
                   batch == 3 ? 10 : 30),
          2);
    std::vector<Json> of_workers;
    for (const auto& one : meters) of_workers.push_back(to_weighted_json(one.summary()));
    const auto all = reduce_over_workers(of_workers);
    EXPECT_DOUBLE_EQ(all.at("f1").get<double>(), expected.value()) << workers;
    EXPECT_DOUBLE_EQ(all.at("per_token").get<double>(), 1.4) << workers;
    EXPECT_NEAR(all.at("perplexity").get<double>(), std::exp(1.4), 1e-9) << workers;
    EXPECT_EQ(all.at("num_samples"), 8);
  }
  // A batch that is empty on a worker, or on all of them so far, does not count.
  std::vector<AverageMeterCollection> uneven(2);
  uneven[1].update({{"f1", expected}}, 0);
  uneven[0].update({{"f1", expected}}, 8);
  uneven[1].update({{"f1", expected}}, 8);
  F1 last;
  last.add(at::tensor({1, 1, 0}), at::tensor({1, 0, 1}));
  uneven[0].update({{"f1", last}}, 3);
  uneven[1].update({{"f1", expected}}, 0);
  F1 all_samples;
  for (int i = 0; i < 2; ++i) all_samples.add(prediction, target);
  all_samples.add(at::tensor({1, 1, 0}), at::tensor({1, 0, 1}));
  const auto counted =
      reduce_over_workers({to_weighted_json(uneven[0].summary()), to_weighted_json(uneven[1].summary())});
  EXPECT_DOUBLE_EQ(counted.at("f1").get<double>(), all_samples.value());
  EXPECT_DOUBLE_EQ(counted.at("last_f1").get<double>(), last.value());
  AverageMeterCollection many, mixed;
  for (int batch = 0; batch < 600; ++batch) many.update(of_batch(prediction, target, 1.0, 3));
  EXPECT_DOUBLE_EQ(many.summary().at("f1").value().get<double>(), expected.value());
  mixed.update({{"f1", expected}});
  try {
    mixed.update({{"f1", 0.5}});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("it is a metric of samples for some batches and a plain value for others"),
              std::string::npos);
  }
}

TEST(OperatorRow, TimersForgetAScopeThatWasAlive) {
  Timers timers;
  timers.enable(true);
  {
    const auto before = timers.record("before");
    timers.enable(false);
    const auto off = timers.record("off");
    timers.enable(true);
    const auto after = timers.record("after");
  }
  EXPECT_EQ(keys(timers.stats()), (std::vector<std::string>{"mean_after_s"}));
}

// What is cast is decided before gradients are averaged, and parameters stay what they are.
struct Ordered : Line {
  void setup(const Config& config) override {
    Line::setup(config);
    for (const auto& parameter : net->parameters()) {
      EXPECT_EQ(parameter.device(), device());
      EXPECT_EQ(parameter.scalar_type(), at::kFloat);
    }
    net->forward(at::full({1, 1}, 1.0 + session().world_rank())).sum().backward();
    const double mean = 1 + (session().world_size() - 1) / 2.0;
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), static_cast<float>(mean)) << "gradients are averaged";
  }
};

TEST(OperatorRow, OrderOfRegistration) {
  on_all([](Launch& launch) {
    auto options = all_ranks(launch);
    options.use_fp16 = true;
    OperatorTrainer<Ordered> trainer(launch, options);
    EXPECT_EQ(trainer.train().at("num_samples"), 46);
  });
}

struct Scheduled : TrainingOperator {
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  std::shared_ptr<torch::optim::StepLR> scheduler;
  double lr() { return optimizer->param_groups().front().options().get_lr(); }
  void setup(const Config&) override {
    torch::nn::Linear net(1, 1);
    std::tie(std::ignore, optimizer, scheduler) =
        register_training(Components{.models = net,
                                     .optimizers = torch::optim::SGD(net->parameters(), 1.0 / 1024),
                                     .criterion = torch::nn::MSELoss(),
                                     .schedulers = [](auto& of) { return torch::optim::StepLR(of, 1, 0.5); }});
    register_data({line(), {.batch_size = 46}});
  }
};

TEST(OperatorRow, SchedulerStepFreq) {
  on_all([](Launch& launch) {
    expect_error("scheduler_step_freq", [&] { OperatorTrainer<Scheduled>(launch, all_ranks(launch)); });
  });
  for (const auto freq : {SchedulerStepFreq::batch, SchedulerStepFreq::epoch, SchedulerStepFreq::manual})
    on_all([&](Launch& launch) {
      auto options = all_ranks(launch);
      options.scheduler_step_freq = freq;
      OperatorTrainer<Scheduled> trainer(launch, options);
      trainer.train({.num_steps = 3});
      auto& its = trainer.get_local_operator();
      const int steps = freq == SchedulerStepFreq::batch ? 3 : freq == SchedulerStepFreq::epoch ? 1 : 0;
      EXPECT_DOUBLE_EQ(its.lr() * 1024, std::pow(0.5, steps));
      its.scheduler->step();
      EXPECT_DOUBLE_EQ(its.lr() * 1024, std::pow(0.5, steps + 1));
    });
}

TEST(OperatorRow, BatchSizeIsDividedAmongTheWorkers) {
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch, {{BATCH_SIZE, 100}, {"other", 1}}));
    EXPECT_EQ(trainer.get_local_operator().config(), (Json{{BATCH_SIZE, 100 / launch.size()}, {"other", 1}}));
  });
  on_all([](Launch& launch) {
    expect_error("*batch_size", [&] { OperatorTrainer<Line>(launch, all_ranks(launch, {{BATCH_SIZE, 0}})); });
    expect_error("many", [&] { OperatorTrainer<Line>(launch, all_ranks(launch, {{BATCH_SIZE, "many"}})); });
  });
}

struct TwoFeaturesImpl : torch::nn::Module {
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(1, 1));
  at::Tensor forward(const at::Tensor& a, const at::Tensor& b) {
    EXPECT_TRUE(at::equal(b, a + 1));
    return linear->forward(a + b);
  }
};
struct TwoFeatures : TrainingOperator {
  void setup(const Config& config) override {
    const auto net = std::make_shared<TwoFeaturesImpl>();
    register_training(Components{.models = net,
                                 .optimizers = torch::optim::SGD(net->parameters(), 0.01),
                                 .criterion = [](const at::Tensor& output, const at::Tensor& target) {
                                   EXPECT_EQ(target.scalar_type(), at::kDouble) << "the last column";
                                   return (output - target).square().mean();
                                 }});
    const auto x = at::arange(12, at::kFloat).unsqueeze(1);
    std::vector<std::pair<std::string, at::Tensor>> columns{{"z", x}, {"a", x + 1}, {"m", x.to(at::kDouble)}};
    if (config.value("more", false)) columns.insert(columns.begin(), {"extra", x});
    if (config.value("fewer", false)) columns.resize(1);
    register_data({Dataset::from_tensors(columns), {.batch_size = 4}});
  }
};

TEST(OperatorRow, ABatchIsFeaturesThenTarget) {
  on_all([](Launch& launch) {
    EXPECT_EQ(OperatorTrainer<TwoFeatures>(launch, all_ranks(launch)).train().at("num_samples"), 12);
    expect_error("does not take 3 features", [&] {
      OperatorTrainer<TwoFeatures>(launch, all_ranks(launch, {{"more", true}})).train();
    });
    expect_error("1 columns", [&] {
      OperatorTrainer<TwoFeatures>(launch, all_ranks(launch, {{"fewer", true}})).train();
    });
  });
}

// --- The default train_batch() ---

/// A network with outputs of any shape, the targets, and a criterion.
template <class Criterion>
struct Losing : TrainingOperator {
  torch::nn::Sequential net{nullptr};
  at::Tensor x, y;
  Criterion criterion;
  Losing(torch::nn::Sequential net_, at::Tensor x_, at::Tensor y_, Criterion criterion_)
      : net(std::move(net_)), x(std::move(x_)), y(std::move(y_)), criterion(std::move(criterion_)) {}
  void setup(const Config&) override {
    register_training(
        Components{.models = net, .optimizers = torch::optim::SGD(net->parameters(), 0.01), .criterion = criterion});
    const auto data = Dataset::from_tensors({{"x", x}, {"y", y}});
    register_data({data, {.global_batch_size = 6}}, OperatorLoader(data, {.global_batch_size = 6}));
  }
};

/// The same on all ranks, from 0 to 1.
at::Tensor fractions(at::IntArrayRef sizes) {
  const auto x = at::zeros(sizes);
  return (at::arange(x.numel(), at::kFloat) / static_cast<double>(x.numel())).view(sizes);
}

/// What training or validating with that criterion ends with; empty where it does well. The output is [samples,
/// outputs], of images [samples, outputs, 2, 2].
template <class Criterion>
std::string ends(Launch& launch, std::int64_t outputs, const at::Tensor& y, const Criterion& criterion,
                 bool trains = true) {
  const bool images = y.dim() == 3;
  const auto x = images ? fractions({y.size(0), 1, 2, 2}) : fractions({y.size(0), 1});
  auto net = images ? torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, outputs, 1)))
                    : torch::nn::Sequential(torch::nn::Linear(1, outputs));
  OperatorTrainer<Losing<Criterion>> trainer(
      launch, [&] { return std::make_unique<Losing<Criterion>>(net, x, y, criterion); }, all_ranks(launch));
  try {
    trains ? trainer.train() : trainer.validate();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(Operators, ALossThatBroadcastsIsRefused) {
  using test::has;
  on_all([](Launch& launch) {
    const auto y = fractions({12});
    const auto refused = [&](const auto& criterion) {
      for (const bool trains : {true, false}) {
        testing::internal::CaptureStderr();
        const auto text = ends(launch, 1, y, criterion, trains);
        EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "and torch warns of nothing";
        EXPECT_TRUE(has(text, "the target of shape [")) << trains;
        EXPECT_TRUE(has(text, ", 1] and")) << trains;
        EXPECT_TRUE(has(text, "target.view_as(output)")) << trains;
      }
    };
    refused(torch::nn::MSELoss());
    refused(torch::nn::L1Loss());
    refused(torch::nn::SmoothL1Loss());
    refused(torch::nn::HuberLoss());
    refused(torch::nn::BCEWithLogitsLoss());
    using Of = const at::Tensor&;
    refused([](Of output, Of target) { return torch::mse_loss(output, target); });
    refused([](Of output, Of target) { return (output - target).square().mean(); });
    refused([](Of output, Of target) { return (at::sigmoid(output) - (2 * target - 1)).abs().mean(); });
    refused([](Of output, Of target) { return torch::l1_loss(output, target.to(at::kDouble)); });
    EXPECT_TRUE(has(ends(launch, 3, y, torch::nn::MSELoss()), "3] and")) << "of any shape, where it is torch's own";
    EXPECT_TRUE(has(ends(launch, 1, fractions({12, 3}), torch::nn::MSELoss()), "3] against")) << "nor this";
  });
}

TEST(Operators, ALossThatIsRightIsTaken) {
  on_all([](Launch& launch) {
    using Of = const at::Tensor&;
    const auto taken = [&](std::int64_t outputs, const at::Tensor& y, const auto& criterion) {
      for (const bool trains : {true, false}) EXPECT_EQ(ends(launch, outputs, y, criterion, trains), "");
    };
    const auto y = fractions({12}), column = fractions({12, 1});
    taken(1, column, torch::nn::MSELoss());
    taken(1, column, torch::nn::BCEWithLogitsLoss());
    taken(1, y, [](Of output, Of target) { return torch::mse_loss(output.squeeze(1), target); });
    taken(1, y, [](Of output, Of target) { return torch::mse_loss(output, target.view_as(output)); });
    taken(1, y, [](Of output, Of target) {  // over all pairs of the batch, which is meant
      return (output - output.squeeze(1)).square().mean() + torch::mse_loss(output.flatten(), target);
    });
    taken(3, column, [](Of output, Of target) { return (output - target).square().mean(); });
    for (const std::int64_t classes : {1, 2, 3, 6}) {  // 6: as many as there are samples in a batch of one rank
      const auto labels = at::arange(12) % classes;
      taken(classes, labels, torch::nn::CrossEntropyLoss());
      taken(classes, labels, [](Of output, Of target) { return torch::cross_entropy_loss(output, target); });
      taken(classes, labels, [](Of output, Of target) { return torch::nll_loss(at::log_softmax(output, 1), target); });
      const auto pixels = (at::arange(12) % classes).view({12, 1, 1}).expand({12, 2, 2}).contiguous();
      taken(classes, pixels, torch::nn::CrossEntropyLoss());
      taken(classes, pixels, torch::nn::NLLLoss());
    }
  });
}

/// y = 2x as the files of `muster convert` have it: [samples, 1] and [samples].
struct OfColumns : TrainingOperator {
  Dataset data;
  BatchColumns columns;
  explicit OfColumns(Dataset data_, BatchColumns columns_ = {})
      : data(std::move(data_)), columns(std::move(columns_)) {}
  void setup(const Config&) override {
    torch::nn::Linear net(1, 1);
    register_training(Components{
        .models = net, .optimizers = torch::optim::Adam(net->parameters(), 0.1), .criterion = [](auto& out, auto& y) {
          return torch::mse_loss(out, y.to(out).view_as(out));
        }});
    const BatchOptions options{.global_batch_size = 8, .dtypes = {{"x", at::kFloat}}};
    register_data({data, options, columns}, OperatorLoader(data, options, columns));
  }
};

TEST(Operators, TheTargetIsNamedWhereColumnsHaveNoOrder) {
  const auto folder = test::shared_folder();
  const auto csv = folder / "line.csv", file = folder / "line.h5";
  Json rows = Json::array();
  if (world().rank() == 0) {
    std::ofstream text(csv);
    for (int i = 0; i < 24; ++i) text << i / 24.0 << "," << 2 * i / 24.0 + 0.001 << "\n";
    text.close();
    convert_csv({csv}, file, {.columns = {"x", "label"}});
  }
  for (int i = 0; i < 24; ++i) rows.push_back({{"x", {i / 24.0}}, {"label", 2 * i / 24.0}});
  world().barrier();
  const auto stream = Dataset::from_stream([](const StreamShard& shard) {
    return [row = shard.worker, workers = shard.workers]() mutable -> std::optional<Json> {
      if (row >= 24) return {};
      const double x = std::exchange(row, row + workers) / 24.0;
      return Json{{"x", {x}}, {"label", 2 * x}};
    };
  });
  for (const auto& data : {Dataset(file.string()), Dataset::from_items(rows), stream})
    on_all([&](Launch& launch) {
      const auto make = [&](const BatchColumns& columns) {
        return [&data, columns] { return std::make_unique<OfColumns>(data, columns); };
      };
      for (const bool trains : {true, false}) {
        OperatorTrainer<OfColumns> unnamed(launch, make({}), all_ranks(launch));
        expect_error(".target = ", [&] { trains ? unnamed.train() : unnamed.validate(); });
      }
      OperatorTrainer<OfColumns> trainer(launch, make({.features = {"x"}, .target = "label"}), all_ranks(launch));
      for (int i = 0; i < 20; ++i) trainer.train();
      EXPECT_LT(trainer.validate().at("val_loss").get<double>(), 0.02);
      EXPECT_NEAR(trainer.get_model()->parameters()[0].item<float>(), 2, 0.5);
      if (detail::data::source_of(data) == detail::data::source_of(stream)) return;
      for (const auto& columns : {BatchColumns{.target = "label"}, BatchColumns{.features = {"x"}}}) {
        OperatorTrainer<OfColumns> half(launch, make(columns), all_ranks(launch));
        EXPECT_EQ(half.train().at("num_samples"), 24);
      }
      const auto wrong = [&](const BatchColumns& columns) {
        return error_of([&] { OperatorTrainer<OfColumns>(launch, make(columns), all_ranks(launch)); });
      };
      EXPECT_TRUE(has(wrong({.features = {"z"}, .target = "label"}), "no column \"z\""));
      EXPECT_TRUE(has(wrong({.features = {"x"}, .target = "x"}), "named twice"));
      EXPECT_TRUE(has(wrong({.features = {"x", "label"}}), "all columns are features"));
    });
  for (auto& row : rows) row["z"] = {0.0};
  on_all([&](Launch& launch) {
    const auto make = [&] {
      return std::make_unique<OfColumns>(Dataset::from_items(rows), BatchColumns{.target = "label"});
    };
    expect_error(" have no order but that of their names. Name the features",
                 [&] { OperatorTrainer<OfColumns>(launch, make, all_ranks(launch)); });
  });
  on_all([&](Launch& launch) {  // chosen in their order
    OperatorTrainer<OfColumns> trainer(
        launch,
        [&] {
          return std::make_unique<OfColumns>(Dataset::from_hdf5({file.string()}, {.columns = {"x", "label"}}));
        },
        all_ranks(launch));
    EXPECT_EQ(trainer.train().at("num_samples"), 24);
  });
}

TEST(Operators, OneLineSaysWhichColumnIsTheTarget) {
  testing::internal::CaptureStderr();
  const int code = program({"--log-level", "info"}, [](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch));
    for (int i = 0; i < 2; ++i) trainer.train(), trainer.validate();
  });
  EXPECT_EQ(code, 0);
  const auto said = testing::internal::GetCapturedStderr();
  const std::string line = "the target is the column \"y\", the features are \"x\"";
  const auto first = said.find(line);
  EXPECT_EQ(first != std::string::npos, world().rank() == 0) << said;
  if (first != std::string::npos) {
    EXPECT_EQ(said.find(line, first + 1), std::string::npos) << said;
  }
}

TEST(OperatorRow, InfoAndBatchInfo) {
  on_all([](Launch& launch) {
    OperatorTrainer<Counting> trainer(launch, all_ranks(launch));
    auto& infos = trainer.get_local_operator().infos;
    trainer.train({.num_steps = 3, .info = {{"mine", 7}}});
    ASSERT_EQ(infos.size(), 3u);
    for (std::int64_t i = 0; i < 3; ++i) {
      const auto& info = infos[static_cast<std::size_t>(i)];
      EXPECT_EQ(info.epoch_idx, 0);
      EXPECT_EQ(info.num_steps, 3);
      EXPECT_EQ(info.batch_idx, i);
      EXPECT_EQ(info.global_step, i);
      EXPECT_EQ(info.info.at("mine"), 7);
    }
    trainer.train({.num_steps = 2});
    EXPECT_EQ(infos.back().epoch_idx, 1) << "the pass before had just ended";
    EXPECT_EQ(infos.back().batch_idx, 1);
    EXPECT_EQ(infos.back().global_step, 4);
    infos.clear();
    trainer.validate();
    EXPECT_EQ(infos.back().global_step, 5);
    EXPECT_EQ(infos.back().num_steps, std::nullopt);
  });
}

TEST(OperatorRow, NumStepsGoesOnAndWraps) {
  on_all([](Launch& launch) {  // three batches a pass
    OperatorTrainer<Counting> trainer(launch, all_ranks(launch));
    auto& seen = trainer.get_local_operator().seen;
    const auto train = [&](std::optional<std::int64_t> num_steps, std::int64_t batches, std::int64_t epoch) {
      const auto results = trainer.train({.num_steps = num_steps});
      EXPECT_EQ(results.at("batch_count"), batches);
      EXPECT_EQ(results.at("epoch"), epoch);
    };
    train(2, 2, 1);
    const auto first = seen.front();
    EXPECT_EQ(first, 4 * launch.rank());
    seen.clear();
    trainer.validate({.num_steps = 2});  // in between
    seen.clear();
    train(2, 2, 2);
    EXPECT_EQ(seen[0], 8 * launch.size() + first) << "the third batch";
    EXPECT_EQ(seen[4], first) << "and the first again";
    train({}, 2, 2);  // what is left
    train({}, 3, 3);
    train(7, 7, 6);
    EXPECT_EQ(trainer.get_local_operator().global_step, 16);
    expect_error("num_steps", [&] { trainer.train({.num_steps = 0}); });
  });
}

TEST(OperatorRow, ResultsOfTrain) {
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch));
    EXPECT_EQ(keys(trainer.train()),
              (std::vector<std::string>{"batch_count", "epoch", "last_train_loss", "num_samples", "train_loss"}));
    OperatorTrainer<Counting> counting(launch, all_ranks(launch));
    const auto results = counting.train();
    EXPECT_EQ(
        results,
        (Json{{"batch_count", 3}, {"epoch", 1}, {"last_m", 2.0}, {"m", 1.0}, {"num_samples", 12 * launch.size()}}));
  });
}

struct Classes : TrainingOperator {
  void setup(const Config&) override {
    torch::nn::Linear net(3, 3);
    const torch::NoGradGuard no_grad;
    net->weight.copy_(at::eye(3));
    net->bias.zero_();
    {
      const at::AutoGradMode grad(true);
      register_training(Components{.models = net,
                                   .optimizers = torch::optim::SGD(net->parameters(), 0.0),
                                   .criterion = torch::nn::CrossEntropyLoss()});
    }
    // 20 of the 25 predictions are right.
    auto target = at::arange(25) % 3;
    const auto x = torch::one_hot(target, 3).to(at::kFloat);
    target.slice(0, 0, 5).add_(1).remainder_(3);
    const auto data = Dataset::from_tensors({{"x", x}, {"y", target}});
    register_data({data, {.batch_size = 4}}, OperatorLoader(data, {.batch_size = 4}));
  }
};

TEST(OperatorRow, ResultsOfValidate) {
  on_all([](Launch& launch) {
    OperatorTrainer<Classes> trainer(launch, all_ranks(launch));
    const auto results = trainer.validate();
    EXPECT_EQ(keys(results), (std::vector<std::string>{"batch_count", "last_val_accuracy", "last_val_loss",
                                                       "num_samples", "val_accuracy", "val_loss"}));
    EXPECT_NEAR(results.at("val_accuracy").get<double>(), 20.0 / 25, 1e-9);
    EXPECT_EQ(results.at("num_samples"), 25);
    EXPECT_EQ(results.at("last_val_accuracy"), 1.0);
    EXPECT_TRUE(OperatorTrainer<Line>(launch, all_ranks(launch)).validate().at("val_accuracy").is_null())
        << "of numbers there is none";
  });
}

/// One output per sample, and targets 0 or 1.
struct Yes : TrainingOperator {
  void setup(const Config&) override {
    torch::nn::Linear net(1, 1);
    register_training(Components{.models = net,
                                 .optimizers = torch::optim::SGD(net->parameters(), 0.1),
                                 .criterion = [](const at::Tensor& output, const at::Tensor& target) {
                                   return torch::binary_cross_entropy_with_logits(output.squeeze(1),
                                                                                  target.to(output.dtype()));
                                 }});
    const auto x = at::arange(24, at::kFloat).unsqueeze(1);
    const auto data = Dataset::from_tensors({{"x", x}, {"y", (x > 8).squeeze(1).to(at::kLong)}});
    register_data({data, {.batch_size = 4}}, OperatorLoader(data, {.batch_size = 4}));
  }
};

TEST(Operators, OfOneOutputThereIsNoAccuracy) {
  on_all([](Launch& launch) {
    OperatorTrainer<Yes> trainer(launch, all_ranks(launch));
    trainer.train();
    EXPECT_TRUE(trainer.validate().at("val_accuracy").is_null()) << "and not the share of class 0";
  });
}

TEST(OperatorRow, Profile) {
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch));
    const auto trained = trainer.train({.profile = true}).at("profile");
    EXPECT_EQ(keys(trained),
              (std::vector<std::string>{"mean_apply_s", "mean_fwd_s", "mean_grad_s", "mean_train_epoch_s"}));
    for (const auto& [name, seconds] : trained.items()) EXPECT_GT(seconds.get<double>(), 0) << name;
    EXPECT_EQ(keys(trainer.validate({.profile = true}).at("profile")),
              (std::vector<std::string>{"mean_eval_fwd_s", "mean_validation_s"}));
    EXPECT_FALSE(trainer.train().contains("profile"));
  });
}

TEST(OperatorRow, ReductionIsWeightedBySamples) {
  on_all([](Launch& launch) {
    OperatorTrainer<Line> trainer(launch, all_ranks(launch, {{"lr", 0.0}, {"batch_size", 5}}));
    auto& net = trainer.get_local_operator().net;
    const auto x = at::arange(46, at::kFloat).unsqueeze(1) / 46;
    const double expected = torch::mse_loss(net->forward(x), 3 * x - 1).item<double>();
    const auto results = trainer.train();
    EXPECT_NEAR(results.at("train_loss").get<double>(), expected, 1e-6) << "as if one rank had seen all";
    EXPECT_NEAR(trainer.validate().at("val_loss").get<double>(), expected, 1e-6);
    EXPECT_EQ(results.at("num_samples"), 46);
    EXPECT_EQ(results.at("batch_count"), (46 + 5 * launch.size() - 1) / (5 * launch.size()));
  });
  on_all([](Launch& launch) {  // one sample: the others of the ranks are left empty
    OperatorTrainer<Counting> trainer(launch, all_ranks(launch, {{"samples", 1}}));
    EXPECT_EQ(trainer.train(),
              (Json{{"batch_count", 1}, {"epoch", 1}, {"last_m", 0.0}, {"m", 0.0}, {"num_samples", 1}}));
  });
}

struct Telling : Counting {
  Metrics train_epoch(OperatorBatches& batches, const EpochInfo& info) override {
    auto results = Counting::train_epoch(batches, info);
    results.insert_or_assign("rank", Metric("rank " + std::to_string(world_rank())));
    results.insert_or_assign("broken", Metric(std::nan("")));
    return results;
  }
};

TEST(OperatorRow, WithoutReductionTheListOfWorkers) {
  on_all([](Launch& launch) {
    OperatorTrainer<Telling> trainer(launch, all_ranks(launch));
    const auto results = trainer.train({.reduce_results = false});
    ASSERT_EQ(results.size(), static_cast<std::size_t>(launch.size()));
    for (int rank = 0; rank < launch.size(); ++rank) {
      const auto& its = results[static_cast<std::size_t>(rank)];
      EXPECT_EQ(its.at("num_samples"), 12);
      EXPECT_EQ(its.at("rank"), "rank " + std::to_string(rank));
    }
    const auto reduced = trainer.train();
    EXPECT_EQ(reduced.at("rank"), "rank 0") << "what is no number is the first worker's";
    EXPECT_TRUE(reduced.at("broken").is_null());
    EXPECT_TRUE(trainer.validate({.reduce_results = false}).is_array());
  });
}

struct Half : Line {
  Metrics train_batch(Batch& batch, const BatchInfo& info) override {
    {
      const auto cast = autocast();
      EXPECT_EQ(net->forward(batch["x"]).scalar_type(), use_fp16() ? at::kBFloat16 : at::kFloat);
    }
    EXPECT_FALSE(scaler().is_enabled()) << "bfloat16 needs none";
    return Line::train_batch(batch, info);
  }
};

TEST(OperatorRow, MixedPrecision) {
  for (const bool wanted : {true, false})
    on_all([&](Launch& launch) {
      auto options = all_ranks(launch);
      options.use_fp16 = wanted;
      options.use_gpu = UseGpu::never;
      OperatorTrainer<Half> trainer(launch, options);
      const double first = trainer.train().at("train_loss");
      Json results;
      for (int i = 0; i < 5; ++i) results = trainer.train();
      EXPECT_LT(results.at("train_loss").get<double>(), first);
      EXPECT_EQ(trainer.get_local_operator().net->weight.scalar_type(), at::kFloat);
    });
}

// As far as one process can show it; tests/fault kills a rank.
struct Failing : Remembering {
  bool fails = false;
  std::vector<std::int64_t> trained;  // global steps, here
  Metrics train_batch(Batch& batch, const BatchInfo& info) override {
    if (fails && info.global_step == 17 && world_rank() == session().world_size() - 1)
      throw std::runtime_error("no luck with this one");
    trained.push_back(info.global_step);
    return Remembering::train_batch(batch, info);
  }
};

struct Ended {
  std::vector<Json> results;
  std::vector<double> weights;
  std::vector<std::int64_t> trained;
  int hooks = 0;
  int code = 0;
};

enum class Main { usual, fused, validates_first, loads_its_first_state };

Ended run_failing(const std::string& name, bool fails, std::vector<std::string> flags = {}, Main main = Main::usual) {
  Ended ended;
  flags.insert(flags.end(), {"--name", name});
  ended.code = program(flags, [&](Launch& launch) {
    auto options = all_ranks(
        launch,
        {{"shuffle", true}, {"batch_size", (12 + launch.size() - 1) / launch.size()}, {"fuse", main == Main::fused}});
    options.initialization_hook = [&] { ++ended.hooks; };
    OperatorTrainer<Failing> trainer(launch, options);
    trainer.get_local_operator().fails = fails;
    struct Keep {
      OperatorTrainer<Failing>& trainer;
      Ended& ended;
      ~Keep() { ended.trained = trainer.get_local_operator().trained; }
    } keep{trainer, ended};
    if (main == Main::validates_first) trainer.validate();
    const auto first = trainer.state_dict();
    for (int i = 0; i < 5; ++i) {
      ended.results.push_back(trainer.train({.num_steps = 6}));
      ended.results.push_back(trainer.validate());
      ended.results.push_back(trainer.apply_all_operators([](Failing& its) { return Json(its.seen); }));
      if (i == 1) {
        const auto saved = trainer.state_dict();
        trainer.train();
        trainer.load_state_dict(saved);
      }
    }
    if (main == Main::loads_its_first_state) trainer.load_state_dict(first);
    ended.weights = weights_of(*trainer.get_model());
    trainer.shutdown();
  });
  return ended;
}

TEST(OperatorRow, ARunThatIsTakenUpAgainGoesOnAtTheCallThatWasCutOff) {
  const auto straight = run_failing("straight", false);
  EXPECT_EQ(straight.code, 0);
  const auto fused = run_failing("fused", false, {}, Main::fused);
  EXPECT_EQ(run_failing("fused_cut", true, {}, Main::fused).code, 1);
  EXPECT_EQ(run_failing("fused_cut", false, {}, Main::fused).weights, fused.weights);
  const auto cut = run_failing("cut", true);
  EXPECT_EQ(cut.code, 1);
  EXPECT_LT(cut.results.size(), straight.results.size());
  const auto again = run_failing("cut", false);
  EXPECT_EQ(again.code, 0);
  EXPECT_EQ(again.results, straight.results);
  EXPECT_EQ(again.weights, straight.weights);
  EXPECT_EQ(again.hooks, 1);
  EXPECT_LT(again.trained.size(), straight.trained.size());
  EXPECT_FALSE(again.trained.empty());
  const auto once_more = run_failing("cut", false);
  EXPECT_EQ(once_more.results, straight.results);
  EXPECT_TRUE(once_more.trained.empty()) << "all was done";
  EXPECT_EQ(run_failing("cut", false, {}, Main::validates_first).code, 64) << "main has changed";
  EXPECT_EQ(run_failing("cut", false, {}, Main::loads_its_first_state).code, 64) << "that state is gone";
  EXPECT_EQ(run_failing("whole", false, {}, Main::loads_its_first_state).code, 0);
}

TEST(OperatorRow, AStopInTheMiddleOfACallIsGoneOnFrom) {
  const auto straight = run_failing("unstopped", false);
  const auto stopped = run_failing("stopped", false, {"--time-limit", "0"});
  EXPECT_EQ(stopped.code, 85);
  EXPECT_LT(stopped.trained.size(), 6u);
  const auto again = run_failing("stopped", false);
  EXPECT_EQ(again.code, 0);
  EXPECT_EQ(again.weights, straight.weights);
  EXPECT_EQ(again.trained.size() + stopped.trained.size(), straight.trained.size());
}

TEST(OperatorRow, AnExceptionIsTheSameOnAllRanksAndEndsTheTrainer) {
  on_all([](Launch& launch) {
    OperatorTrainer<Failing> trainer(launch, all_ranks(launch, {{"batch_size", 1}}));
    trainer.get_local_operator().fails = true;
    expect_error("no luck with this one", [&] { trainer.train({.num_steps = 30}); });
    expect_error("has ended with an error", [&] { trainer.train(); });
  });
  on_all([](Launch& launch) {  // and there may be another
    EXPECT_EQ(OperatorTrainer<Line>(launch, all_ranks(launch)).train().at("num_samples"), 46);
  });
}

struct Alone : Line {
  void setup(const Config& config) override {
    Line::setup(config);
    net->forward(at::full({1, 1}, 1.0 + session().world_rank())).sum().backward();
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 1.0f + static_cast<float>(world_rank()));
  }
};

TEST(OperatorRow, WrapDdpFalseLeavesGradientsAlone) {
  on_all([](Launch& launch) {
    auto options = all_ranks(launch);
    options.wrap_ddp = false;
    OperatorTrainer<Alone> trainer(launch, options);
    EXPECT_EQ(trainer.apply_all_operators([](Alone& its) { return its.world_rank(); }).size(),
              static_cast<std::size_t>(launch.size()));
  });
}

TEST(OperatorRow, InitializationHook) {
  on_all([](Launch& launch) {
    static int hooks;
    hooks = 0;
    struct Looking : NoData {
      void setup(const Config&) override { EXPECT_EQ(hooks, 1); }
    };
    OperatorTrainer<Looking> trainer(launch, {.initialization_hook = [] { ++hooks; }});
    EXPECT_EQ(hooks, 1) << "on ranks that wait too";
    expect_error("no environment", [&] {
      OperatorTrainer<Looking>(launch, {.initialization_hook = [&] {
                                 if (launch.rank() == launch.size() - 1) throw std::runtime_error("no environment");
                               }});
    });
  });
  const int code = program({"--name", "hooked"}, [](Launch& launch) {
    auto options = all_ranks(launch);
    options.initialization_hook = [] {
      EXPECT_FALSE(std::filesystem::exists(test::storage() / "hooked"));
      world().barrier();
    };
    OperatorTrainer<Line>(launch, options).train();
  });
  EXPECT_EQ(code, 0);
}

// The example of RaySGD's documentation, 200 samples of y = 2x + 1.
struct LinearFit : TrainingOperator {
  void setup(const Config& config) override {
    torch::nn::Linear net(1, 1);
    register_training(Components{
        .models = net, .optimizers = torch::optim::SGD(net->parameters(), 1e-2), .criterion = torch::nn::MSELoss()});
    const auto x = at::linspace(0, 10, 200).unsqueeze(1);
    register_data(
        {Dataset::from_tensors({{"x", x}, {"y", 2 * x + 1}}), {.batch_size = config.at(BATCH_SIZE), .shuffle = true}});
  }
};

TEST(OperatorRow, TheLinearExample) {
  on_all([](Launch& launch) {
    OperatorTrainer<LinearFit> trainer(launch, all_ranks(launch, {{BATCH_SIZE, 30}}));
    Json results;
    for (int epoch = 0; epoch < 40; ++epoch) results = trainer.train();
    EXPECT_LE(results.at("train_loss").get<double>(), 0.09);
    EXPECT_EQ(results.at("num_samples"), 200);
  });
}

}  // namespace
}  // namespace muster::operator_test
