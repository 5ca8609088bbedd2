// What trainers, sessions and what they prepare refuse, each with its text.
#include "support/job.hpp"

#include "muster/data_loader.hpp"
#include "muster/muster.hpp"
#include "muster/sync_batch_norm.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace muster::refusals_test {
namespace {

using test::line;
using Loop = std::function<void(Session&, const Config&)>;
using torch::nn::Linear;

/// The text of the error with which the run `storage`/refused ends.
std::string refusal(TorchTrainerOptions options, const Loop& loop = {}, const std::vector<std::string>& flags = {},
                    const std::filesystem::path& storage = test::shared_folder()) {
  std::string text = "no error";
  options.run_config.name = "refused";
  options.datasets.emplace("train", line());
  test::launch({storage, flags, {}}, [&](Launch& launch) {
    try {
      auto result =
          TorchTrainer(launch, loop ? loop : Loop([](Session&, const Config&) { FAIL(); }), std::move(options)).fit();
      if (result.error) text = result.error->what();
      return result;
    } catch (const Error& error) {
      text = error.what();
      throw;
    }
  });
  return text;
}

void expect_refused(const std::string& text, const std::string& fact) {
  EXPECT_NE(text.find(fact), std::string::npos) << "\"" << text << "\" has no \"" << fact << "\"";
}

TEST(Refusals, LearningRatesThatDriftApart) {
  const auto text = refusal({}, [](Session& session, const Config&) {
    auto net = session.prepare_model(Linear(1, 1));
    auto optimizer = session.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.25));
    auto alone = session.prepare_optimizer(torch::optim::SGD({torch::ones({1}, torch::requires_grad())}, 1.0));
    for (int report = 0; report < 3; ++report) {
      for (int i = 0; i < 2; ++i) {
        net->forward(torch::ones({1, 1})).sum().backward();
        optimizer.step();
      }
      // The parameters of this one are each rank's own.
      alone.param_groups().front().options().set_lr(1.0 + session.world_rank());
      alone.step();
      session.report({{"loss", 1.0}});
      if (report == 1 && session.world_rank() > 0)  // as a scheduler does that is fed by this rank's own loss
        optimizer.param_groups().front().options().set_lr(0.125);
    }
  });
  expect_refused(text, test::world().size() == 1
                           ? "no error"
                           : "that of parameter group 0 of optimizer 0 is 0.25 on rank 0 and 0.125 on rank 1. Give "
                             "schedulers the same value on every rank");
}

TEST(Refusals, NoLearningRateThatIsNanOnAllRanks) {
  const auto text = refusal({}, [](Session& session, const Config&) {
    auto net = session.prepare_model(Linear(1, 1));
    auto optimizer = session.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.25));
    net->forward(torch::ones({1, 1})).sum().backward();
    optimizer.param_groups().front().options().set_lr(std::numeric_limits<double>::quiet_NaN());
    optimizer.step();
    session.report({{"loss", 1.0}});
  });
  EXPECT_EQ(text, "no error");
}

TEST(Refusals, WeightsThatCannotBe) {
  const auto infinity = std::numeric_limits<double>::infinity();
  for (const double weight : {-1.0, infinity - infinity, infinity, 1e-10, 2e12}) {
    const auto loop = [&](Session& session, const Config&) {
      auto net = session.prepare_model(Linear(1, 1));
      for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 4})) {
        const bool last = session.world_rank() + 1 == session.world_size();
        auto scope = session.step(batch, last ? weight : 1.0);
        net->forward(batch["x"]).mean().backward();
      }
    };
    expect_refused(refusal({}, loop), "is no weight. Give what this rank's loss is a mean over");
    const auto [code, result] = test::run(
        {test::shared_folder(), {}, {.run_config = {.name = "weight"}, .datasets = {{"train", line()}}}}, loop);
    EXPECT_EQ(code, 64) << weight;
  }
}

TEST(Refusals, OptionsThatCannotBe) {
  using std::chrono::milliseconds;
  expect_refused(refusal({.scaling_config = {.num_workers = 0}}), "0 is not a number of workers. Ask for 1 or more");
  expect_refused(refusal({.scaling_config = {.virtual_workers = 0}}), "0 virtual workers cannot be divided evenly");
  expect_refused(refusal({.run_config = {.histogram_interval = -1}}), "histogram_interval is -1. Give 1 or more");
  expect_refused(refusal({.run_config = {.profile = {.first_step = 7, .last_step = 6}}}),
                 "choosing the steps of the profile: 7 to 6 is no range of steps");
  expect_refused(refusal({.torch_config = {.backend = "smoke"}}), "there is no backend \"smoke\"");
  expect_refused(refusal({.torch_config = {.timeout = milliseconds(0)}}),
                 "how long ranks wait for each other: 0 ms is not a time limit");
  TorchTrainerOptions validated;
  validated.validation = {.function = [](Session&, const Checkpoint&) { return Json::object(); },
                          .timeout = milliseconds(0)};
  expect_refused(refusal(validated), "how long a validation may take: 0 ms is not a time limit");
  expect_refused(refusal({}, {}, {"--resume", "must"}), "it has no checkpoint. Use --resume auto to start afresh");
  expect_refused(refusal({.run_config = {.checkpoint_config = {.checkpoint_score_attribute = "\xff"}}}),
                 "reading CheckpointConfig::checkpoint_score_attribute: it is not UTF-8");
  expect_refused(refusal({}, {}, {}, test::shared_folder() / "\xff"),
                 "its path is not UTF-8. Choose another --storage");
  if (!torch::cuda::is_available())
    expect_refused(refusal({.scaling_config = {.use_gpu = true}}), "has no GPU that this libtorch can use");
}

TEST(Refusals, ScoresThatCannotBeCompared) {
  const auto report = [](const Metrics& metrics) {
    return [=](Session& session, const Config&) {
      auto net = session.prepare_model(Linear(1, 1));
      auto state = session.state({{"model", net}});
      for ([[maybe_unused]] auto epoch : session.epochs(1)) session.report(metrics, state);
    };
  };
  const TorchTrainerOptions best{.run_config = {.checkpoint_config = {.checkpoint_score_attribute = "score"}}};
  expect_refused(refusal(best, report({{"score", Json("high")}})), "it is reported and is not a number");
  expect_refused(refusal(best, report({{"loss", 1}})), "no such metric is reported. Choose one of ");
  TorchTrainerOptions stopping;
  stopping.run_config.callbacks = {early_stopping({.metric = "loss", .mode = ScoreOrder::min})};
  expect_refused(refusal(stopping, report({{"loss", Json("low")}})), "its reported value is not a number");
}

using Calls = std::vector<std::pair<const char*, std::function<void(Session&)>>>;

/// Each call must fail with its text, in a run of its own.
void expect_refused(const Calls& calls, const TorchTrainerOptions& options = {}) {
  for (const auto& [fact, call] : calls)
    expect_refused(refusal(options, [&, &call = call](Session& session, const Config&) { call(session); }), fact);
}

TEST(Refusals, CallsOfTheSession) {
  expect_refused({
      {"taking the mean over the workers: the tensor is undefined", [](Session& s) { s.mean({}); }},
      {"logging a value: it has no name", [](Session& s) { s.log_scalar("", 1); }},
      {"-1 is not a number of epochs", [](Session& s) { s.epochs(-1); }},
      {"the trainer was given no such dataset", [](Session& s) { s.get_dataset_shard("test"); }},
      {"the function's return value is not a JSON object",
       [](Session& s) {
         ValidationFunction([](Session&, const Checkpoint&) { return Json::array(); })(s, Checkpoint::from_dict({}));
       }},
      {"the trainer has no validation function. Give it one", [](Session& s) { s.report({}, {.validation = true}); }},
  });
}

TEST(Refusals, ModelsAndOptimizers) {
  expect_refused({
      {"making a gradient scaler: the parameter weight is complex. Train this model without a scaler",
       [](Session& s) {
         auto net = std::make_shared<torch::nn::Module>();
         net->register_parameter("weight", torch::zeros({2}, torch::kComplexFloat));
         s.prepare_model(net);
         s.grad_scaler({.enabled = false});
         s.grad_scaler();
       }},
      {"max_grad_norm is negative or not a number. Give a norm, or 0 for none",
       [](Session& s) {
         auto net = s.prepare_model(Linear(1, 1));
         s.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.1), {.max_grad_norm = -1});
       }},
      {"its type is none of ",
       [](Session& s) {
         struct Own : torch::optim::Optimizer {
           explicit Own(std::vector<at::Tensor> parameters)
               : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                           std::make_unique<torch::optim::SGDOptions>(0.1)) {}
           at::Tensor step(LossClosure) override { return {}; }
         };
         auto net = s.prepare_model(Linear(1, 1));
         Own own(net->parameters());
         s.state({{"model", net}, {"optimizer", own}});
       }},
  });
  if (test::world().size() > 1)  // one rank averages nothing, and has torch's own batch-norm
    expect_refused({
        {"the model is an embedding with max_norm",
         [](Session& s) { s.prepare_model(torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).max_norm(1))); }},
        {"all ranks together have one value for each channel, or none",
         [](Session& s) {
           auto net = s.prepare_model(SyncBatchNorm1d(1));
           net->forward(at::ones({s.world_rank() == 0 ? 1 : 0, 1}));
         }},
        {"normalising a batch over the ranks: gradients of gradients were requested",
         [](Session& s) {
           auto net = s.prepare_model(SyncBatchNorm1d(1));
           const auto x = at::arange(4, at::kFloat).view({4, 1}).requires_grad_();
           net->forward(x).pow(2).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
         }},
    });
  expect_refused({{"inside join() not all ranks take part in each of its evaluations", [](Session& s) {
                     auto net = s.prepare_model(Linear(1, 1));
                     auto optimizer = s.prepare_optimizer(torch::optim::LBFGS(net->parameters()));
                     const auto joined = s.join();
                     optimizer.step([&] { return net->forward(at::ones({1, 1})).sum(); });
                   }}});
}

TEST(Refusals, BadNumbersThatCannotBeLookedFor) {
  const TorchTrainerOptions careful{.run_config = {.failure_config = {.bad_numbers = BadNumbers::stop}}};
  const auto step = [](Session& session, std::vector<at::Tensor> more, double factor, bool is_joined) {
    auto net = session.prepare_model(Linear(1, 1));
    auto parameters = net->parameters();
    parameters.insert(parameters.end(), more.begin(), more.end());
    auto optimizer = session.prepare_optimizer(torch::optim::SGD(parameters, 0.1));
    const auto backward = [&] {
      (net->forward(at::ones({1, 1})).sum() * factor).backward();
      optimizer.step();
    };
    if (!is_joined) return backward();
    const auto joined = session.join();
    backward();
  };
  expect_refused(
      {
          {"its gradients cannot be checked for bad numbers between its evaluations",
           [](Session& s) {
             auto net = s.prepare_model(Linear(1, 1));
             auto optimizer = s.prepare_optimizer(torch::optim::LBFGS(net->parameters()));
             optimizer.step([&] { return net->forward(at::ones({1, 1})).sum(); });
           }},
          {" is NaN or infinite in step 0. Look at the data of that step",
           [&](Session& s) { step(s, {}, std::numeric_limits<double>::quiet_NaN(), false); }},
          {"the optimizer has parameters whose gradients are not averaged",
           [&](Session& s) { step(s, {at::ones({1}).requires_grad_()}, 1, true); }},
      },
      careful);
}

TEST(Refusals, ABackwardAfterTheSession) {
  if (test::world().size() == 1) GTEST_SKIP() << "one rank has torch's own batch-norm";
  at::Tensor loss;
  test::run({test::shared_folder(), {}, {}}, [&](Session& session, const Config&) {
    auto net = session.prepare_model(SyncBatchNorm1d(1));
    loss = net->forward(at::arange(4, at::kFloat).view({4, 1})).sum();
  });
  try {
    loss.backward();
    ADD_FAILURE() << "backward() ran without the session";
  } catch (const std::exception& error) {
    expect_refused(error.what(),
                   "the session or DataParallel of this forward pass is over. Call backward() before it ends");
  }
}

TEST(Refusals, WithVirtualWorkers) {
  const TorchTrainerOptions options{.scaling_config = {.virtual_workers = 12}};
  expect_refused(
      {
          {"joining ranks: virtual workers have as many batches on every rank", [](Session& s) { auto it = s.join(); }},
          {"virtual workers do that themselves", [](Session& s) { auto it = s.no_sync(); }},
          {"virtual workers sum gradients as they are",
           [](Session& s) { s.prepare_model(Linear(1, 1), {.comm_hook = powersgd_hook({})}); }},
          {"virtual workers do not sum the gradients of sparse embeddings",
           [](Session& s) { s.prepare_model(torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true))); }},
      },
      options);
}

TEST(Refusals, DataThatCannotBe) {
  TorchTrainerOptions options;
  options.datasets.emplace("stream", Dataset::from_stream([](const StreamShard&) { return StreamReader(); }));
  expect_refused({{"the function given for it returned no reader function",
                   [](Session& s) {
                     auto shard = s.get_dataset_shard("stream");
                     for ([[maybe_unused]] auto& batch : shard.iter_torch_batches({.batch_size = 4})) break;
                   }}},
                 options);
}

TEST(Refusals, ALoaderWithTheNameOfADataset) {
  expect_refused({{"a dataset and a data loader have that name", [](Session& s) {
                     auto shard = s.get_dataset_shard("train");
                     auto batches = shard.iter_torch_batches({.batch_size = 4});
                     for ([[maybe_unused]] auto& batch : batches) break;
                     prepare_data_loader(s, torch::data::datasets::TensorDataset(at::arange(40)), {.name = "train"});
                   }}});
}

TEST(Refusals, ABackendThatMakesNoProcessGroup) {
  std::string text;
  test::launch({test::shared_folder(), {}, {}}, [&](Launch& launch) {
    auto result = DataParallelTrainer(launch, [](Session& session) { session.process_group(); }).fit();
    if (result.error) text = result.error->what();
    return result;
  });
  expect_refused(text, "taking the process group: this trainer's backend made none");
}

TEST(Refusals, AFolderThatWasMovedAway) {
  for (const auto& [is_replaced, writes_artifacts] :
       {std::pair(false, false), std::pair(true, false), std::pair(false, true), std::pair(true, true)}) {
    const auto storage = test::shared_folder();
    const auto move_away = [&, is_replaced = is_replaced, writes_artifacts = writes_artifacts](Session& session,
                                                                                               const Config&) {
      auto net = session.prepare_model(Linear(1, 1));
      auto state = session.state({{"model", net}});
      if (session.world_rank() == 0) {
        std::filesystem::rename(storage / "refused", storage / "elsewhere");
        if (is_replaced) std::filesystem::create_directory(storage / "refused");
      }
      session.barrier();
      writes_artifacts ? static_cast<void>(session.artifacts()) : session.report({}, state);
    };
    expect_refused(refusal({}, move_away, {}, storage), is_replaced
                                                            ? "moved away while the job runs, and another one is there"
                                                            : "was moved away or removed while the job runs");
    EXPECT_EQ(std::filesystem::exists(storage / "refused"), is_replaced) << "it is not made again";
  }
}

TEST(Refusals, RanksThatDiffer) {
  if (test::world().size() == 1) GTEST_SKIP() << "one rank cannot differ from another";
  expect_refused({
      {"some workers gave a state to save and others did not",
       [](Session& s) {
         auto net = s.prepare_model(Linear(1, 1));
         auto state = s.state({{"model", net}});
         s.world_rank() == 0 ? s.report({}, state) : s.report({});
       }},
      {"the workers give the checkpoint different names",
       [](Session& s) {
         auto net = s.prepare_model(Linear(1, 1));
         auto state = s.state({{"model", net}});
         s.report({}, state, {.checkpoint_name = "of_rank_" + std::to_string(s.world_rank())});
       }},
      {"the options of prepare_model on all ranks: bucket_bytes is 1000 on rank 0 and 1001 on rank 1. Give the same",
       [](Session& s) { s.prepare_model(Linear(1, 1), {.bucket_bytes = std::size_t(1000 + s.world_rank())}); }},
      {"the options of prepare_model on all ranks: parallel is \"data\" on rank 0 and \"none\" on rank 1",
       [](Session& s) {
         s.prepare_model(Linear(1, 1), {.parallel = s.world_rank() == 0 ? Parallel::data : Parallel::none});
       }},
      {"the options of prepare_optimizer on all ranks: max_grad_norm is 1.0 on rank 0 and 2.0 on rank 1",
       [](Session& s) {
         auto net = s.prepare_model(Linear(1, 1));
         s.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.1), {.max_grad_norm = 1.0 + s.world_rank()});
       }},
      {"the options of a gradient scaler on all ranks: init_scale is 1.0 on rank 0 and 2.0 on rank 1",
       [](Session& s) { s.grad_scaler({.init_scale = 1.0 + s.world_rank()}); }},
      {"the options of join on all ranks: divide_by_initial_world_size is true on rank 0 and false on rank 1",
       [](Session& s) {
         auto net = s.prepare_model(Linear(1, 1));
         const auto join = s.join({.divide_by_initial_world_size = s.world_rank() == 0});
       }},
      {"the options of the process group on all ranks: chunk is 1 on rank 0 and 2 on rank 1",
       [](Session& s) { make_process_group(s.communicator(), {.chunk = std::size_t(1 + s.world_rank())}); }},
  });
  const int rank = test::world().rank();
  TorchTrainerOptions options;
  if (rank == 0) options.datasets.emplace("more", line());
  expect_refused(refusal(options), "has none of that name, and rank ");
  expect_refused(refusal({.scaling_config = {.num_workers = rank == 0 ? 1 : 2}}),
                 "the options of the trainer on all ranks: num_workers is 1 on rank 0 and 2 on rank 1");
  expect_refused(refusal({.run_config = {.checkpoint_config = {.num_to_keep = 1 + rank}}}),
                 "the options of the trainer on all ranks: num_to_keep is 1 on rank 0 and 2 on rank 1");
}

}  // namespace
}  // namespace muster::refusals_test
