// Whole runs: a training function on every rank, its reports, its checkpoints, and what goes wrong.
#include "support/job.hpp"

#include "base/file.hpp"
#include "muster/muster.hpp"
#include "support/forge.hpp"
#include "support/io_errors.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace muster::train_test {
namespace {

using test::line;
using test::run;
using test::world;

struct Fit {
  std::vector<float> weights;  // at the end
  int steps = 0;
};

torch::nn::Sequential line_net() {
  return torch::nn::Sequential(torch::nn::Linear(1, 8), torch::nn::BatchNorm1d(8), torch::nn::Dropout(0.1),
                               torch::nn::Linear(8, 1));
}

/// Trains a small net for `epochs`, reports after each epoch and after steps 2, 7, 12 … `each_step` may throw.
void fit_line(Session& session, std::int64_t epochs, Fit& fit,
              const std::function<void(std::int64_t)>& each_step = {}) {
  auto net = session.prepare_model(line_net());
  torch::optim::Adam optimizer(net->parameters(), 0.05);
  auto state = session.state({{"model", net}, {"optimizer", optimizer}});
  state.restore();
  auto shard = session.get_dataset_shard("train");
  for ([[maybe_unused]] auto epoch : session.epochs(epochs)) {
    Mean loss;
    for (auto& batch : shard.iter_torch_batches({.batch_size = 4, .shuffle = true})) {
      optimizer.zero_grad();
      auto l = torch::mse_loss(net->forward(batch["x"]), batch["y"]);
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
      ++fit.steps;
      if (session.global_step() % 5 == 2) session.report({{"loss", loss}}, state);
      if (each_step) each_step(session.global_step());
    }
    session.report({{"loss", loss}}, state);
  }
  fit.weights.clear();
  for (const auto& parameter : net->parameters())
    for (std::int64_t i = 0; i < parameter.numel(); ++i) fit.weights.push_back(parameter.flatten()[i].item<float>());
}

TorchTrainerOptions with_line(std::string name) {
  return {.run_config = {.name = std::move(name)}, .datasets = {{"train", line()}}};
}

TEST(Train, RunsTheWholePath) {
  const auto storage = test::shared_folder();
  Fit fit;
  const auto [code, result] =
      run({storage, {}, with_line("whole")}, [&](Session& session, const Config&) { fit_line(session, 3, fit); });
  EXPECT_EQ(code, 0);
  ASSERT_TRUE(result);
  EXPECT_FALSE(result->error);
  EXPECT_EQ(result->path, storage / "whole");
  const std::size_t reports = 3 + static_cast<std::size_t>(fit.steps + 3) / 5;
  EXPECT_EQ(result->metrics_history.size(), reports);
  EXPECT_EQ(result->metrics.at("training_iteration"), reports);
  EXPECT_EQ(result->metrics.at("epoch"), 2);
  EXPECT_EQ(result->metrics.at("world_size"), world().size());
  EXPECT_EQ(result->metrics.at("global_step"), fit.steps);
  EXPECT_LT(result->metrics.at("loss").get<double>(), result->metrics_history.front().at("loss").get<double>());
  ASSERT_TRUE(result->checkpoint);
  EXPECT_EQ(list_checkpoints(storage / "whole").back().index, static_cast<int>(reports) - 1);
  EXPECT_EQ(result->checkpoint->path(), list_checkpoints(storage / "whole").back().path);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : result->checkpoint->to_dict().tensors)
    if (name.starts_with("model/")) names.push_back(name.substr(6));
  EXPECT_EQ(names, (std::vector<std::string>{"0.bias", "0.weight", "1.bias", "1.num_batches_tracked", "1.running_mean",
                                             "1.running_var", "1.weight", "3.bias", "3.weight"}))
      << "as the module has them, without a prefix";
  for (const char* name : {"params.json", "result.json", "progress.csv", "logs/rank_00000.log"})
    EXPECT_TRUE(std::filesystem::exists(storage / "whole" / name)) << name;
  // The same numbers on all ranks.
  const auto mine = Json(fit.weights).dump() + Json(result->metrics).dump();
  for (const auto& theirs : world().all_gather(mine)) EXPECT_EQ(theirs, mine);
}

TEST(Train, ContinuesBitForBitInTheMiddleOfAnEpoch) {
  const auto storage = test::shared_folder();
  Fit undisturbed, resumed;
  const auto straight = run({storage, {}, with_line("straight")},
                            [&](Session& session, const Config&) { fit_line(session, 3, undisturbed); });

  const auto stopped = run({storage, {}, with_line("broken")}, [&](Session& session, const Config&) {
    fit_line(session, 3, resumed, [](std::int64_t at) {
      if (at == 8) throw std::runtime_error("stopped here");  // one step after a report in the middle of an epoch
    });
  });
  EXPECT_EQ(stopped.first, 1);
  ASSERT_TRUE(stopped.second->error);
  EXPECT_NE(std::string(stopped.second->error->what()).find("stopped here"), std::string::npos);

  const auto again =
      run({storage, {}, with_line("broken")}, [&](Session& session, const Config&) { fit_line(session, 3, resumed); });
  EXPECT_EQ(again.first, 0);
  EXPECT_EQ(resumed.weights, undisturbed.weights);
  EXPECT_EQ(again.second->metrics_history.size(), straight.second->metrics_history.size()) << "cut back, then added to";
  EXPECT_FALSE(std::filesystem::exists(storage / "broken" / "error.txt"));
}

TEST(Train, OneRanksExceptionSurfacesOnAll) {
  const int bad = world().size() - 1;
  const auto [code, result] = run({test::shared_folder(), {}, with_line("bad")}, [&](Session& session, const Config&) {
    Fit fit;
    fit_line(session, 2, fit, [&](std::int64_t at) {
      if (at == 1 && session.world_rank() == bad) throw std::runtime_error("bad sample 7");
    });
  });
  EXPECT_EQ(code, 1);
  ASSERT_TRUE(result && result->error);
  const std::string text = result->error->what();
  EXPECT_NE(text.find("bad sample 7"), std::string::npos);
  for (const auto& theirs : world().all_gather(text)) EXPECT_EQ(theirs, text);
  if (world().size() > 1) {
    EXPECT_NE(text.find("rank " + std::to_string(bad)), std::string::npos) << text;
    EXPECT_NE(text.find(world().topology().hosts[static_cast<std::size_t>(bad)]), std::string::npos) << text;
  }
  EXPECT_EQ(detail::read_file(result->path / "error.txt"), text + "\n");
}

TEST(Train, WhatOneRankCannotSaveIsAnErrorOnAllAndTrainingMayGoOn) {
  const int bad = world().size() - 1;
  const auto [code, result] = run({test::shared_folder(), {}, with_line("bad")}, [&](Session& session, const Config&) {
    bool fails = session.world_rank() == bad;
    const StateEntry entry(
        [&]() -> StateDict {
          if (fails) throw std::runtime_error("cannot be saved now");
          return {.values = 1};
        },
        [](const StateDict&) {});
    auto state = session.state({{"entry", entry}});
    for (int i = 0; i < 2; ++i) try {
        session.report({{"a", i}}, state);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("cannot be saved now"), std::string::npos) << error.what();
      }
    fails = false;
    session.report({{"a", 3}}, state);
    EXPECT_EQ(session.communicator().all_reduce(1.0), world().size());
  });
  EXPECT_EQ(code, 0) << (result && result->error ? result->error->what() : "");
  ASSERT_TRUE(result && result->checkpoint);
  EXPECT_EQ(result->metrics.at("a"), 3.0);
}

/// Goes with the session: between a rank's failure and the agreement it hears of the others'.
struct Lingering : torch::nn::Module {
  explicit Lingering(Communicator ranks) : ranks_(ranks) { register_module("layer", torch::nn::Linear(1, 1)); }
  ~Lingering() override {
    try {
      for (int round = 0; round < 1000; ++round) ranks_.all_gather("");
    } catch (const RemoteError&) {
    }
  }
  Communicator ranks_;
};

/// The ranks meet when it is first asked what it is, which is before one of them has told the others.
struct Trouble : std::exception {
  Trouble(Communicator ranks)
      : ranks_(std::make_shared<std::optional<Communicator>>(ranks)),
        text_("trouble of rank " + std::to_string(ranks.rank())) {}
  const char* what() const noexcept override {
    if (const auto ranks = std::exchange(*ranks_, std::nullopt)) ranks->barrier();
    return text_.c_str();
  }
  std::shared_ptr<std::optional<Communicator>> ranks_;
  std::string text_;
};

TEST(Train, RanksThatFailAtOnceDoNotExcuseEachOther) {
  const auto [code, result] =
      run({test::shared_folder(), {}, with_line("at_once")}, [](Session& session, const Config&) {
        session.prepare_model(std::make_shared<Lingering>(session.communicator()));
        throw Trouble(session.communicator());
      });
  EXPECT_EQ(code, 1);
  ASSERT_TRUE(result && result->error);
  EXPECT_NE(std::string(result->error->what()).find("trouble of rank "), std::string::npos);
}

TEST(Train, AFailureBeforeACallThatMakesChannelsIsTriedAgain) {
  using Call = std::function<void(Session&)>;
  const std::vector<std::pair<std::string, Call>> calls{
      {"prepare_model", [](Session& session) { session.prepare_model(torch::nn::Linear(2, 2)); }},
      {"grad_scaler", [](Session& session) { session.grad_scaler(); }},
      {"duplicate", [](Session& session) { session.communicator().duplicate(); }},
      {"split", [](Session& session) { session.communicator().split(0); }},
      {"shared_memory", [](Session& session) { session.communicator().shared_memory(10'000); }},
      {"make_process_group", [](Session& session) { make_process_group(session.communicator()); }},
  };
  const int bad = world().size() - 1;
  const auto storage = test::shared_folder();
  const auto survives = [&](const std::string& name, const Call& before, const Call& call) {
    auto options = with_line(name);
    options.run_config.failure_config.max_failures = 1;
    int attempts = 0;
    const auto [code, result] = run({storage, {"--timeout", "30"}, options}, [&](Session& session, const Config&) {
      ++attempts;
      if (before) before(session);
      if (attempts == 1 && session.world_rank() == bad) throw std::runtime_error("a passing trouble");
      call(session);
    });
    EXPECT_EQ(code, 0) << name << ": " << (result && result->error ? result->error->what() : "");
    EXPECT_EQ(attempts, 2) << name;
  };
  for (const auto& [name, call] : calls) survives(name, {}, call);

  std::shared_ptr<torch::nn::Linear> net;
  const auto prepare = [&](Session& session) {
    net = std::make_shared<torch::nn::Linear>(session.prepare_model(torch::nn::Linear(2, 2)));
  };
  survives("join", prepare, [&](Session& session) { auto join = session.join(); });
  survives("prepare_optimizer", prepare, [&](Session& session) {
    auto optimizer = session.prepare_optimizer(torch::optim::SGD((*net)->parameters(), 0.1), {.fuse = Fuse::always});
    (*net)->forward(torch::ones({1, 2})).sum().backward();
    optimizer.step();
  });
}

TEST(Train, OneTimeOutIsThatOfEverything) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  using Call = std::function<void(Session&, torch::nn::Linear&)>;
  const std::vector<std::pair<std::string, Call>> calls{
      {"report",
       [](Session& session, torch::nn::Linear&) {
         session.report({{"a", 1}});
       }},
      {"save",
       [](Session& session, torch::nn::Linear& net) {
         session.report({{"a", 1}}, session.state({{"model", net}}));
       }},
      {"gradients",
       [](Session&, torch::nn::Linear& net) {
         net->forward(torch::ones({1, 2})).sum().backward();
       }},
      {"process_group", [](Session& session, torch::nn::Linear&) { session.mean(torch::ones({2})); }},
  };
  const auto storage = test::shared_folder();
  const auto limit_of = [&](const std::string& name, const std::vector<std::string>& flags, const Call& call) {
    auto options = with_line(name);
    options.torch_config.timeout = std::chrono::milliseconds(300);
    const auto [code, result] = run({storage, flags, options}, [&](Session& session, const Config&) {
      auto net = session.prepare_model(torch::nn::Linear(2, 2));
      if (session.world_rank() == 0) return call(session, net);
      // In no call that all make, in which ranks that differ are named at once.
      std::vector<at::Tensor> never{torch::ones({1})};
      session.process_group()->recv(never, 0, 0)->wait(std::chrono::minutes(1));
    });
    EXPECT_EQ(code, 75) << name;
    return result && result->error ? std::string(result->error->what()) : std::string();
  };
  for (const auto& [name, call] : calls) {
    const auto text = limit_of(name, {}, call);
    EXPECT_NE(text.find("within 0.3"), std::string::npos) << name << ": " << text;
  }
  const auto text = limit_of("flag", {"--timeout", "0.2"}, calls[0].second);
  EXPECT_NE(text.find("within 0.2"), std::string::npos) << "the flag wins: " << text;
}

TEST(Train, TriesAgainFromTheNewestCheckpoint) {
  auto options = with_line("retry");
  options.run_config.failure_config.max_failures = 2;
  int attempts = 0;
  Fit fit, straight;
  const auto storage = test::shared_folder();
  const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
    const int attempt = ++attempts;
    fit_line(session, 2, fit, [&](std::int64_t at) {
      if (attempt <= 2 && at == 2 + attempt * 2 && session.world_rank() == 0)
        throw std::runtime_error("a passing trouble");
    });
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(attempts, 3);
  run({storage, {}, with_line("straight")}, [&](Session& session, const Config&) { fit_line(session, 2, straight); });
  EXPECT_EQ(fit.weights, straight.weights);
}

TEST(Train, FailuresAreCountedAnewAfterProgress) {
  /// The exit code and the attempts of a run that fails `failures` times.
  const auto end = [](std::optional<int> max_failures, int failures, bool saves) {
    auto options = with_line("progress");
    if (max_failures) options.run_config.failure_config.max_failures = *max_failures;
    int attempts = 0;
    const auto train = [&](Session& session, const Config&) {
      double value = ++attempts;
      auto state = session.state({{"value", value}});
      if (saves) session.report({{"value", value}}, state);
      if (attempts <= failures) throw std::runtime_error("a passing trouble");
    };
    const int code = run({test::shared_folder(), {}, options}, train).first;
    return std::pair(code, attempts);
  };
  EXPECT_EQ(end(1, 4, true), std::pair(0, 5));
  EXPECT_EQ(end(1, 4, false), std::pair(1, 2));
  EXPECT_EQ(end({}, 1, false), std::pair(1, 1)) << "none unless said";
  EXPECT_EQ(end(-1, 3, false), std::pair(0, 4)) << "without limit";
}

TEST(Train, WhatTheDataAreIsNotTriedAgain) {
  auto options = with_line("of_the_data");
  options.run_config.failure_config.max_failures = -1;
  int attempts = 0;
  const auto train = [&](Session& session, const Config&) {
    if (++attempts < 5 && session.world_rank() == 0)
      throw Error(ExitCode::data, "reading x.h5", "it is truncated", "Make it anew");
    session.barrier();
  };
  const auto [code, result] = run({test::shared_folder(), {}, options}, train);
  EXPECT_EQ(code, 65);
  EXPECT_EQ(attempts, 1);
  ASSERT_TRUE(result && result->error);
  EXPECT_NE(std::string(result->error->what()).find("reading x.h5: it is truncated"), std::string::npos);
}

TEST(Train, SparesGetTheSameResult) {
  auto options = with_line("spares");
  options.scaling_config.num_workers = 1;
  int calls = 0;
  Fit fit;
  const auto [code, result] = run({test::shared_folder(), {}, options}, [&](Session& session, const Config&) {
    ++calls;
    EXPECT_EQ(session.world_size(), 1);
    fit_line(session, 1, fit);
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(calls, world().rank() == 0 ? 1 : 0);
  EXPECT_EQ(result->metrics.at("training_iteration"), result->metrics_history.size());
}

TEST(Train, RefusesMoreWorkersThanRanks) {
  EXPECT_EQ(
      run({test::shared_folder(), {"--workers", "99"}, with_line("many")}, [](Session&, const Config&) { FAIL(); })
          .first,
      64);
}

TEST(Train, RefusesBadNamesAndPlaces) {
  const auto storage = test::shared_folder();
  for (const char* name : {"../up", "a/b", "..", ".hidden"})
    EXPECT_EQ(run({storage, {"--name", name}, with_line("x")}, [](Session&, const Config&) { FAIL(); }).first, 64)
        << name;
  EXPECT_EQ(run({"s3://bucket", {}, with_line("x")}, [](Session&, const Config&) { FAIL(); }).first, 64);
  EXPECT_EQ(run({"/proc/muster", {}, with_line("x")}, [](Session&, const Config&) { FAIL(); }).first, 75);
}

TEST(Train, ReadsSettingsAndRefusesUnknownOnes) {
  auto options = with_line("settings");
  options.train_loop_config = {{"lr", 0.5}, {"depth", 2}, {"layers", {{"width", 3}}}};
  const auto storage = test::shared_folder(), file = storage / "config.json";
  if (world().rank() == 0) detail::write_file(file, R"({"lr": 0.25, "layers": {"width": 5}})");
  world().barrier();
  // The file's values replace the program's, and the flags' replace the file's.
  const std::vector<std::string> flags{"--config", file.string(), "--set", "layers.width=7"};
  int calls = 0;
  Config seen;
  const auto [code, result] = run({storage, flags, options}, [&](Session&, const Config& config) {
    ++calls;
    seen = config;
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(calls, 1) << "once on each worker";
  EXPECT_EQ(seen, Json({{"lr", 0.25}, {"depth", 2}, {"layers", {{"width", 7}}}}));
  EXPECT_EQ(Json::parse(detail::read_file(storage / "settings" / "params.json")).at("train_loop_config"), seen);
  EXPECT_EQ(run({storage, {"--set", "layers.widht=7"}, options}, [](Session&, const Config&) { FAIL(); }).first, 64);
  EXPECT_EQ(run({storage, {"--backend", "smoke"}, options}, [](Session&, const Config&) { FAIL(); }).first, 64);
}

TEST(Train, MissingDataIsFoundBeforeTraining) {
  auto options = with_line("missing");
  options.datasets.emplace("test", "/nonexistent/test.h5");
  EXPECT_EQ(run({test::shared_folder(), {}, options}, [](Session&, const Config&) { FAIL(); }).first, 65);
}

TEST(Train, AGpuThatIsMissingIsSaid) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "there is a GPU";
  auto options = with_line("gpu");
  options.scaling_config.use_gpu = true;
  EXPECT_EQ(run({test::shared_folder(), {}, options}, [](Session&, const Config&) { FAIL(); }).first, 65);
}

TEST(Train, ASecondJobIsRefused) {
  const auto storage = test::shared_folder();
  std::optional<detail::File> other;
  if (world().rank() == 0) {
    detail::make_directories(storage / "held");
    detail::write_file(storage / "held" / ".lock", "another host, process 1");
    other.emplace(storage / "held" / ".lock", detail::File::Mode::write);
    struct flock whole {};
    whole.l_type = F_WRLCK;
    ASSERT_EQ(::fcntl(other->descriptor(), F_OFD_SETLK, &whole), 0);
  }
  world().barrier();
  EXPECT_EQ(run({storage, {}, with_line("held")}, [](Session&, const Config&) { FAIL(); }).first, 64);
  world().barrier();
}

TEST(Train, ARunOfSomebodyElseIsNotWrittenTo) {
  const auto storage = test::shared_folder();
  if (world().rank() == 0) detail::make_directories(storage / "theirs");
  const bool root = ::geteuid() == 0;
  if (world().rank() == 0 && root) {
    ASSERT_EQ(::chown((storage / "theirs").c_str(), 65534, 65534), 0);
  }
  world().barrier();
  if (!root) GTEST_SKIP() << "only root can give a folder away";
  EXPECT_EQ(run({storage, {}, with_line("theirs")}, [](Session&, const Config&) { FAIL(); }).first, 64);
  EXPECT_TRUE(std::filesystem::is_empty(storage / "theirs"));
}

TEST(Train, NothingIsWrittenThroughLinks) {
  for (const char* name : {".lock", "logs", "logs/rank_00000.log", "result.json", "progress.csv", "params.json"}) {
    const auto storage = test::shared_folder(), precious = storage / "precious", link = storage / "run" / name;
    if (world().rank() == 0) {
      detail::make_directories(link.parent_path());
      if (std::string(name) == "logs")
        detail::make_directories(precious);
      else
        detail::write_file(precious, "theirs");
      std::filesystem::create_symlink(precious, link);
    }
    world().barrier();
    run({storage, {}, with_line("run")}, [&](Session& session, const Config&) { session.report({{"a", 1}}); });
    world().barrier();
    if (std::string(name) == "logs")
      EXPECT_TRUE(std::filesystem::is_empty(precious));
    else
      EXPECT_EQ(detail::read_file(precious), "theirs") << name;
  }
}

TEST(Train, TroubleWithItsFilesIsNotTakenForTheCause) {
  const auto storage = test::shared_folder();
  auto options = with_line("blocked");
  options.run_config.failure_config.max_failures = 1;
  const auto block = [&](const char* name) {  // no file can take the place of a folder
    if (world().rank() != 0) return;
    std::filesystem::remove(storage / "blocked" / name);
    detail::make_directories(storage / "blocked" / name / "x");
  };
  block("error.txt");
  world().barrier();
  int attempts = 0;
  const auto train = [&](Session& session, const Config&) {
    session.report({{"a", 1}});
    if (++attempts != 2) throw std::runtime_error("a passing trouble");
    block("params.json");
  };
  const auto retried = run({storage, {}, options}, train);
  EXPECT_EQ(retried.first, 0) << "the training is done";
  EXPECT_EQ(attempts, 2);
  if (world().rank() == 0) std::filesystem::remove_all(storage / "blocked" / "params.json");
  world().barrier();
  const auto failed = run({storage, {}, with_line("blocked")}, [&](Session&, const Config&) {
    block("result.json");
    throw std::runtime_error("the cause");
  });
  EXPECT_EQ(failed.first, 1);
  ASSERT_TRUE(failed.second && failed.second->error);
  EXPECT_NE(std::string(failed.second->error->what()).find("the cause"), std::string::npos);
}

TEST(Train, AFolderThatIsGoneIsNotTakenForTheCause) {
  const auto storage = test::shared_folder();
  const auto [code, result] = run({storage, {}, with_line("gone")}, [&](Session& session, const Config&) {
    session.report({{"a", 1}});
    if (world().rank() == 0) std::filesystem::rename(storage / "gone", storage / "elsewhere");
    throw std::runtime_error("the cause");
  });
  EXPECT_EQ(code, 1);
  ASSERT_TRUE(result && result->error);
  EXPECT_NE(std::string(result->error->what()).find("the cause"), std::string::npos);
}

TEST(Train, AFinishedRunSaysSo) {
  const auto storage = test::shared_folder();
  Fit fit;
  const auto train = [&](Session& session, const Config&) { fit_line(session, 1, fit); };
  run({storage, {}, with_line("done")}, train);
  const int steps = fit.steps;
  const auto [code, result] = run({storage, {}, with_line("done")}, train);
  EXPECT_EQ(code, 0);
  EXPECT_EQ(fit.steps, steps) << "nothing was trained again";
  EXPECT_GE(result->metrics_history.size(), 2u);
}

TEST(Train, AFinishedRunThatHasLostItsLastRowsHasThatOfItsNewestCheckpoint) {
  const auto storage = test::shared_folder();
  const auto file = storage / "lost" / "result.json";
  int begun = 0;
  const auto train = [&](Session& session, const Config&) {
    ++begun;
    double value = 0;
    const auto state = session.state({{"value", value}});
    while (++value < 4) session.report({{"a", value}}, state);
  };
  const auto whole = run({storage, {}, with_line("lost")}, train).second;
  const auto rows = detail::read_file(file);
  const auto last = rows.rfind('\n', rows.size() - 2) + 1;
  // As a loss of power may leave a file that was appended to and not synced.
  for (const auto& left : {rows.substr(0, last), rows.substr(0, last + 9), std::string(),
                           rows.substr(0, last) + std::string(rows.size() - last, '\0'),
                           rows.substr(0, last) + std::string(40, '\0') + rows.substr(last + 40)}) {
    world().barrier();
    if (world().rank() == 0) std::ofstream(file) << left;
    world().barrier();
    const auto [code, result] = run({storage, {}, with_line("lost")}, train);
    EXPECT_EQ(code, 0);
    EXPECT_EQ(result->metrics, whole->metrics);
    EXPECT_EQ(Result::from_path(storage / "lost").metrics, whole->metrics);
    EXPECT_EQ(result->metrics_history.size(), left.empty() ? 1u : 3u);
  }
  EXPECT_EQ(begun, 1) << "nothing was trained again";
}

TEST(Train, ResumeFlagsDecide) {
  const auto storage = test::shared_folder();
  Fit fit;
  const auto train = [&](Session& session, const Config&) { fit_line(session, 1, fit); };
  EXPECT_EQ(run({storage, {"--resume", "must"}, with_line("r")}, train).first, 65) << "nothing to go on from";
  EXPECT_EQ(run({storage, {"--resume", "never"}, with_line("r")}, train).first, 0);
  EXPECT_EQ(run({storage, {"--resume", "never"}, with_line("r")}, train).first, 64);
  fit.steps = 0;
  EXPECT_EQ(run({storage, {"--resume", (storage / "r").string()}, with_line("other")}, train).first, 0);
  EXPECT_EQ(fit.steps, 0) << "the other run's only epoch is done";
  EXPECT_EQ(run({storage, {"--resume", (storage / "none").string()}, with_line("third")}, train).first, 65);
}

TEST(Train, AnotherModelsCheckpointIsRefusedByName) {
  const auto storage = test::shared_folder();
  Fit fit;
  run({storage, {}, with_line("model")}, [&](Session& session, const Config&) { fit_line(session, 1, fit); });
  const auto [code, result] =
      run({storage,
           {"--set", "x=2"},
           {.train_loop_config = {{"x", 1}}, .run_config = {.name = "model"}, .datasets = {{"train", line()}}}},
          [&](Session& session, const Config&) {
            auto net = session.prepare_model(torch::nn::Linear(3, 3));
            session.state({{"model", net}}).restore();
          });
  EXPECT_EQ(code, 65);
  EXPECT_NE(std::string(result->error->what()).find("weight"), std::string::npos) << result->error->what();
}

TEST(Train, ReportsOfMetricsAlone) {
  const auto [code,
              result] = run({test::shared_folder(), {}, with_line("metrics")}, [](Session& session, const Config&) {
    Mean mean;
    mean.add(session.world_rank(), session.world_rank() + 1);
    Metrics metrics{{"rank", session.world_rank()}, {"mean", mean}, {"same", 5}, {"epoch", 9}, {"nan", std::nan("")}};
    if (session.world_rank() == session.world_size() - 1) metrics.insert({"of_one", 7});
    session.report(metrics);
    session.report({{"rank", session.world_rank()}}, {.reduce = false});
    EXPECT_FALSE(session.get_checkpoint());
    EXPECT_EQ(session.mean(torch::full({2}, double(session.world_rank())))[1].item<double>(),
              (session.world_size() - 1) / 2.0);
    for (const auto type : {at::kHalf, at::kBFloat16}) {
      const auto large = torch::full({2}, 40000, type);
      EXPECT_TRUE(at::equal(session.mean(large), large)) << "the sum is beyond the range of half";
    }
    EXPECT_EQ(session.mean(torch::tensor(session.world_rank())).item<double>(), (session.world_size() - 1) / 2.0);
    for (const auto& large : {torch::full({2}, 3e38), torch::full({2}, 1.5e308, torch::kDouble)})
      EXPECT_TRUE(at::allclose(session.mean(large), large)) << "the sum is beyond the range of its type";
    EXPECT_THROW(session.mean(at::Tensor()), Error);
  });
  EXPECT_EQ(code, 0);
  const int n = world().size();
  const auto& first = result->metrics_history[0];
  double sum = 0, weights = 0;
  for (int r = 0; r < n; ++r) sum += r * (r + 1), weights += r + 1;
  EXPECT_DOUBLE_EQ(first.at("mean").get<double>(), sum / weights);
  EXPECT_DOUBLE_EQ(first.at("rank").get<double>(), (n - 1) / 2.0);
  EXPECT_TRUE(first.at("same").is_number_integer());
  EXPECT_EQ(first.at("same"), 5);
  EXPECT_EQ(first.at("of_one"), 7) << "the row has the keys of all ranks";
  EXPECT_TRUE(first.at("nan").is_null());
  EXPECT_EQ(first.at("epoch"), 9) << "the user's epoch wins";
  EXPECT_EQ(result->metrics.at("rank").size(), static_cast<std::size_t>(n));
}

TEST(Train, AReservedMetricIsRefusedEverywhere) {
  const auto [code, result] =
      run({test::shared_folder(), {}, with_line("reserved")}, [](Session& session, const Config&) {
        if (session.world_rank() == 0)
          session.report({{"global_step", 1}});
        else
          session.report({{"fine", 1}});
      });
  EXPECT_EQ(code, 1);
  EXPECT_NE(std::string(result->error->what()).find("global_step"), std::string::npos);
}

/// What rank 0 wrote to its standard error meanwhile.
template <class Call>
std::string warnings_of(const Call& call) {
  if (world().rank() == 0) testing::internal::CaptureStderr();
  call();
  return world().broadcast(world().rank() == 0 ? testing::internal::GetCapturedStderr() : "");
}

TEST(Train, OnlyAPassThatEndsByItselfIsWarnedOf) {
  const auto storage = test::shared_folder();
  for (const bool fails : {false, true}) {
    const auto warnings = warnings_of([&] {
      run({storage, {"--log-level", "warn"}, with_line(fails ? "failed" : "whole")},
          [&](Session& session, const Config&) {
            const auto net = session.prepare_model(line_net());
            int batches = 0;
            auto shard = session.get_dataset_shard("train");
            for ([[maybe_unused]] auto& batch : shard.iter_torch_batches({.batch_size = 2}))
              if (++batches == 3 && fails) throw std::runtime_error("it has failed");
          });
    });
    EXPECT_EQ(warnings.find("no gradients were averaged") == std::string::npos, fails) << warnings;
  }
}

TEST(Train, APassWhoseGradientsAreNotAveragedYetIsNotWarnedOf) {
  const auto storage = test::shared_folder();
  for (const std::string way : {"accumulates", "averages without muster", "accumulates, then evaluates"}) {
    const auto warnings = warnings_of([&] {
      run({storage, {"--log-level", "warn"}, with_line(way)}, [&](Session& session, const Config&) {
        ModelOptions options;
        if (way == "averages without muster") options.parallel = Parallel::none;
        auto net = session.prepare_model(torch::nn::Linear(1, 1), options);
        auto shard = session.get_dataset_shard("train");
        for (auto& batch : shard.iter_torch_batches({.batch_size = 2})) {
          const auto accumulating = session.no_sync();
          net->forward(batch["x"]).sum().backward();
        }
        if (way != "accumulates, then evaluates") return;
        for (auto& batch : shard.iter_torch_batches({.batch_size = 2})) net->forward(batch["x"]);
      });
    });
    EXPECT_EQ(warnings.find("no gradients were averaged") != std::string::npos, way == "accumulates, then evaluates")
        << way << ": " << warnings;
  }
}

TEST(Train, WhatIsTheUsersAndDiffersByRankIsNotSaved) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const auto storage = test::shared_folder();
  const int last = world().size() - 1;
  const auto report = [&](const std::string& name, const auto& make) {
    const auto [code, result] = run({storage, {}, with_line(name)}, [&](Session& session, const Config&) {
      double best = 0.5;
      Json own = {{"seen", {1, 2}}};
      auto table = torch::zeros({300, 400});
      auto state = session.state({{"best", best}, {"own", own}, {"table", table}});
      session.report({{"a", 1}}, state);
      make(session.world_rank(), best, own, table);
      session.report({{"a", 2}}, state);
    });
    EXPECT_EQ(code, 1) << name;
    EXPECT_EQ(list_checkpoints(storage / name).size(), 1u) << "the one before stays, alone";
    EXPECT_EQ(list_checkpoints(storage / name).back().problem, "");
    const std::string text = result->error ? result->error->what() : "no error";
    for (const auto& theirs : world().all_gather(text)) EXPECT_EQ(theirs, text);
    EXPECT_NE(text.find("rank " + std::to_string(last) + " has other values"), std::string::npos) << text;
    EXPECT_NE(text.find("per_rank"), std::string::npos) << text;
    return text;
  };
  auto text = report("tensor", [&](int rank, double&, Json&, torch::Tensor& table) {
    if (rank == last) table.fill_(1);
  });
  EXPECT_NE(text.find("saving table"), std::string::npos) << text;
  text = report("number", [&](int rank, double& best, Json&, torch::Tensor&) { best = rank == last ? 0.75 : 0.5; });
  EXPECT_NE(text.find("best (0.5 on rank 0, 0.75 on rank " + std::to_string(last)), std::string::npos) << text;
  text = report("json", [&](int rank, double&, Json& own, torch::Tensor&) { own["seen"][1] = rank == last ? 3 : 2; });
  EXPECT_NE(text.find("own/seen/1"), std::string::npos) << text;
}

TEST(Train, AModelThatHasDriftedIsRank0sWholeWithAWarning) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const auto storage = test::shared_folder();
  std::optional<Result> result;
  const auto warnings = warnings_of([&] {
    result = run({storage, {"--log-level", "warn"}, with_line("drift")}, [&](Session& session, const Config&) {
               auto net = session.prepare_model(torch::nn::Linear(300, 400));
               torch::optim::SGD optimizer(net->parameters(), 0.1);
               {
                 const torch::NoGradGuard no_grad;
                 net->weight.fill_(session.world_rank() == 0 ? 1.0 : 1.25);
               }
               if (session.world_rank() == session.world_size() - 1)
                 static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options()).lr(0.2);
               session.report({{"a", 1}}, session.state({{"model", net}, {"optimizer", optimizer}}));
             }).second;
  });
  ASSERT_TRUE(result->checkpoint);
  const auto saved = result->checkpoint->to_dict();
  EXPECT_TRUE(saved.tensors.at("model/weight").eq(1).all().item<bool>()) << "a mixture";
  EXPECT_EQ(saved.values.at("optimizer").at("param_groups").at(0).at("lr"), 0.1);
  for (const char* part : {"model/weight", "by up to 0.25", "optimizer/param_groups/0/lr (0.1 on rank 0, 0.2 on rank"})
    EXPECT_NE(warnings.find(part), std::string::npos) << warnings;
  EXPECT_EQ(warnings.find("model/bias"), std::string::npos) << warnings;
}

TEST(Train, EachRankGoesOnWithItsOwn) {
  const auto storage = test::shared_folder();
  const auto train = [&](Session& session, bool resumes) {
    const int rank = session.world_rank();
    auto mine = torch::full({2}, double(rank));
    Json notes = {{"rank", rank}};
    if (resumes) {
      mine.zero_();
      session.get_checkpoint()->load("mine", per_rank(mine));
      EXPECT_EQ(mine[1].item<double>(), rank);
      mine.zero_();
      notes = nullptr;
    }
    auto state = session.state({{"mine", per_rank(mine)}, {"notes", per_rank(notes)}});
    EXPECT_EQ(state.restore(), resumes);
    EXPECT_EQ(mine[1].item<double>(), rank);
    EXPECT_EQ(notes.at("rank"), rank);
    session.report({{"a", 1}}, state);
    if (!resumes) throw std::runtime_error("stopped here");
  };
  EXPECT_EQ(run({storage, {}, with_line("own")}, [&](Session& s, const Config&) { train(s, false); }).first, 1);
  if (world().size() > 1) {
    const auto [code, result] =
        run({storage, {"--workers", "1"}, with_line("own")}, [](Session& session, const Config&) {
          auto mine = torch::full({2}, -1.0);
          Json notes = "as before";
          auto state = session.state({{"mine", per_rank(mine)}, {"notes", per_rank(notes)}});
          EXPECT_THROW(state.restore(), Error);
          EXPECT_EQ(mine[1].item<double>(), -1);
          EXPECT_EQ(notes, "as before");
          state.restore();
        });
    EXPECT_EQ(code, 65);
    const auto text = "mine: each of " + std::to_string(world().size()) + " ranks had its own, and here it is 1 rank";
    ASSERT_TRUE(result && result->error);
    EXPECT_NE(std::string(result->error->what()).find(text), std::string::npos) << result->error->what();
  }
  EXPECT_EQ(run({storage, {}, with_line("own")}, [&](Session& s, const Config&) { train(s, true); }).first, 0);
}

/// Rows of reports without what is of the clock.
std::vector<Json> timeless(std::vector<Json> rows) {
  for (auto& row : rows)
    for (const char* key :
         {"timestamp", "time_this_iter_s", "time_total_s", "samples_per_s", "rank_times", "memory_bytes", "late_ranks"})
      row.erase(key);
  return rows;
}

TEST(Train, AMeanInTheStateCoversTheWholeOfAResumedEpoch) {
  const auto storage = test::shared_folder();
  const auto train = [](Session& session, std::int64_t stop_at) {
    Mean mean;
    double steps = 0;
    auto state = session.state({{"mean", mean}, {"steps", steps}});
    state.restore();
    auto shard = session.get_dataset_shard("train");
    for ([[maybe_unused]] auto epoch : session.epochs(3)) {
      for (auto& batch : shard.iter_torch_batches({.batch_size = 4, .shuffle = true})) {
        mean.add(batch["y"].sum() / 3, batch.size());
        ++steps;
        if (session.global_step() % 2 == 0) session.report({{"mean", mean}}, state);
        if (session.global_step() == stop_at) throw std::runtime_error("stopped here");
      }
      const Metrics metrics{{"mean", mean}};
      mean.reset();
      session.report(metrics, state);
    }
  };
  const auto straight = run({storage, {}, with_line("straight")}, [&](Session& s, const Config&) { train(s, -1); });
  ASSERT_EQ(straight.first, 0);
  const auto broken = [&](std::int64_t stop_at, const std::vector<std::string>& flags = {}) {
    return run({storage, flags, with_line("broken")}, [&](Session& s, const Config&) { train(s, stop_at); });
  };
  // In the middle of the first epoch, after its last batch, and in the middle of a later one.
  const std::int64_t last = (46 + 4 * world().size() - 1) / (4 * world().size());
  for (const std::int64_t at : {std::int64_t{3}, last, last + 3}) EXPECT_EQ(broken(at).first, 1) << at;
  const auto resumed = broken(-1);
  EXPECT_EQ(resumed.first, 0);
  EXPECT_EQ(timeless(resumed.second->metrics_history), timeless(straight.second->metrics_history));

  // At another number of ranks each sample counts once, still.
  if (world().size() == 1) return;
  const auto fewer = [&](const std::string& name, std::int64_t stop_at, const std::vector<std::string>& flags) {
    return run({storage, flags, with_line(name)}, [&](Session& session, const Config&) {
      Mean mean;
      auto state = session.state({{"mean", mean}});
      state.restore();
      auto shard = session.get_dataset_shard("train");
      for ([[maybe_unused]] auto epoch : session.epochs(1)) {
        for (auto& batch : shard.iter_torch_batches({.batch_size = 4})) {
          mean.add(batch["y"].mean(), batch.size());
          session.report({{"mean", mean}}, state);
          if (session.global_step() == stop_at) throw std::runtime_error("stopped here");
        }
        session.report({{"mean", mean}, {"samples", mean.samples()}}, state);
      }
    });
  };
  EXPECT_EQ(fewer("fewer", 2, {}).first, 1);
  const auto [code, result] = fewer("fewer", -1, {"--workers", "1"});
  ASSERT_EQ(code, 0);
  EXPECT_EQ(result->metrics.at("samples"), 46);
  EXPECT_NEAR(result->metrics.at("mean").get<double>(), 3 * 45.0 / 2 / 46 - 1, 1e-6);
}

TEST(Train, UsersFilesAreUnited) {
  const auto storage = test::shared_folder();
  const auto [code, result] = run({storage, {}, with_line("files")}, [&](Session& session, const Config&) {
    const auto mine = storage / ("from_" + std::to_string(session.world_rank()));
    detail::make_directories(mine);
    detail::write_file(mine / ("rank_" + std::to_string(session.world_rank())), "hello");
    session.report({{"a", 1}}, Checkpoint::from_directory(mine));
    ASSERT_TRUE(session.get_checkpoint());
  });
  EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
  for (int r = 0; r < world().size(); ++r)
    EXPECT_EQ(detail::read_file(result->checkpoint->path() / ("rank_" + std::to_string(r))), "hello");
}

TEST(Train, AllRanksMayCopyACheckpointToOnePlace) {
  const auto storage = test::shared_folder();
  const auto [code, result] = run({storage, {}, with_line("copied")}, [&](Session& session, const Config&) {
    auto weights = torch::full({100'000}, 7.0);
    session.report({}, session.state({{"weights", weights}}));
    session.get_checkpoint()->to_directory(storage / "copy");
    session.barrier();
    EXPECT_EQ(verify_checkpoint(storage / "copy").problem, "");
  });
  EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
}

TEST(Train, WhatCouldNotBeReadAgainIsRefusedByName) {
  const auto storage = test::shared_folder();
  Json deep = 1;
  for (int level = 0; level < 300; ++level) deep = Json::array({std::move(deep)});
  const auto text = [&](const TrainLoop& train) {
    const auto [code, result] = run({storage, {}, with_line("unreadable")}, train);
    EXPECT_NE(code, 0);
    return std::string(result && result->error ? result->error->what() : "no error");
  };
  const auto metric = text([&](Session& session, const Config&) { session.report({{"a", Metric(deep)}}); });
  EXPECT_NE(metric.find("reporting the metric \"a\""), std::string::npos) << metric;
  const auto file = text([&](Session& session, const Config&) {
    const auto mine = storage / ("of_" + std::to_string(session.world_rank()));
    detail::make_directories(mine);
    detail::write_file(mine / "caf\xe9.txt", "hello");
    session.report({{"a", 1}}, Checkpoint::from_directory(mine));
  });
  EXPECT_NE(file.find("is not UTF-8"), std::string::npos) << file;
}

TEST(Train, ARunsFolderIsNoCheckpointToStartFrom) {
  const auto storage = test::shared_folder();
  Fit fit;
  run({storage, {}, with_line("first")}, [&](Session& session, const Config&) { fit_line(session, 1, fit); });
  auto options = with_line("second");
  options.resume_from_checkpoint = Checkpoint::from_directory(storage / "first");
  const auto [code, result] = run({storage, {}, options}, [&](Session&, const Config&) { ADD_FAILURE(); });
  EXPECT_EQ(code, 64);
  EXPECT_NE(std::string(result->error->what()).find("is the folder of a run"), std::string::npos);
}

TEST(Train, TheCauseOfAFailureIsKeptUntilTrainingBeginsAgain) {
  const auto storage = test::shared_folder();
  const auto folder = storage / "cause";
  for (const bool within_a_job : {false, true}) {
    auto options = with_line("cause");
    int attempts = 0;
    const auto start = [&](const std::vector<std::string>& flags, bool fails) {
      return run({storage, flags, options}, [&](Session& session, const Config&) {
        if (++attempts == 1 && fails) throw std::runtime_error("not yet");
        if (fails && session.world_rank() == 0) std::ofstream(folder / "stop") << "";
        for (;;)
          if (session.should_stop()) session.report({{"a", 1}}, session.state({}));
      });
    };
    if (within_a_job) {
      options.run_config.failure_config.max_failures = 1;
      EXPECT_EQ(start({}, true).first, 85);
      EXPECT_EQ(attempts, 2);
    } else {
      EXPECT_EQ(start({}, true).first, 1);
      EXPECT_TRUE(std::filesystem::exists(folder / "error.txt"));
      EXPECT_EQ(start({"--time-limit", "0"}, false).first, 85);
    }
    EXPECT_FALSE(std::filesystem::exists(folder / "error.txt"));
    EXPECT_FALSE(Result::from_path(folder).error);
  }
}

TEST(Train, TheUsersMetadataWinsOverTheTrainers) {
  const auto storage = test::shared_folder();
  auto options = with_line("metadata");
  options.metadata = {{"who", "the trainer"}, {"lr", 0.1}};
  const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
    const auto name = std::to_string(session.world_rank());
    const auto mine = storage / ("from_" + name);
    detail::make_directories(mine);
    detail::write_file(mine / "file", "hello");
    auto checkpoint = Checkpoint::from_directory(mine);
    checkpoint.set_metadata({{"who", "the user on rank " + name}, {"rank_" + name, true}});
    session.report({{"a", 1}}, checkpoint);
  });
  EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
  Json want{{"who", "the user on rank 0"}, {"lr", 0.1}};
  for (int r = 0; r < world().size(); ++r) want["rank_" + std::to_string(r)] = true;
  EXPECT_EQ(result->checkpoint->get_metadata(), want);
}

TEST(Train, EvaluationLeavesTheModeAsItWas) {
  run({test::shared_folder(), {}, with_line("mode")}, [](Session& session, const Config&) {
    const torch::nn::Sequential made(torch::nn::Linear(1, 2), torch::nn::BatchNorm1d(2));
    torch::nn::Sequential net = session.prepare_model(made);
    EXPECT_EQ(net.get(), made.get()) << "nothing is wrapped";
    net[1]->as<torch::nn::BatchNorm1d>()->eval();
    net->forward(torch::full({2, 1}, double(session.world_rank())));
    {
      const auto evaluation = session.evaluation(net);
      EXPECT_FALSE(net->is_training());
      EXPECT_FALSE(torch::GradMode::is_enabled());
    }
    EXPECT_TRUE(net->is_training());
    EXPECT_FALSE(net[1]->as<torch::nn::BatchNorm1d>()->is_training()) << "frozen before, frozen after";
    EXPECT_TRUE(torch::GradMode::is_enabled());
  });
}

TEST(Train, EvaluationOfAPartOrOfSeveralModelsHasTheMeanStatistics) {
  const auto [code, result] = run({test::shared_folder(), {}, with_line("parts")}, [](Session& session, const Config&) {
    const auto make = [&] {
      return session.prepare_model(torch::nn::Sequential(torch::nn::Linear(1, 2), torch::nn::BatchNorm1d(2)));
    };
    auto net = make(), other = make();
    const auto mean_of = [](const torch::nn::Sequential& layers) {
      return layers->ptr(1)->as<torch::nn::BatchNorm1d>()->running_mean;
    };
    const auto differ = [&] {
      for (const auto& layers : {net, other}) mean_of(layers).fill_(session.world_rank());
    };
    const double mean = (session.world_size() - 1) / 2.0;
    {
      differ();
      const auto evaluation = session.evaluation(net[1]);
      EXPECT_TRUE(net->is_training());
      EXPECT_FALSE(net[1]->is_training());
      EXPECT_NEAR(mean_of(net)[0].item<double>(), mean, 1e-6);
      EXPECT_EQ(mean_of(other)[0].item<double>(), session.world_rank()) << "has no part in it";
    }
    {
      differ();
      auto both = std::make_shared<torch::nn::Module>();
      both->register_module("net", net);
      both->register_module("other", other);
      const auto evaluation = session.evaluation(both);
      for (const auto& layers : {net, other}) EXPECT_NEAR(mean_of(layers)[0].item<double>(), mean, 1e-6);
    }
  });
  EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
}

TEST(Train, OtherBuffersStayEachRanksOwn) {
  const auto storage = test::shared_folder();
  const auto [code, result] =
      run({storage, {"--log-level", "warn"}, with_line("buffers")}, [](Session& session, const Config&) {
        auto layers = std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(1, 2), torch::nn::BatchNorm1d(2));
        auto seen = layers->register_buffer("seen", torch::zeros({2}));
        auto net = session.prepare_model(layers);
        const double rank = session.world_rank();
        seen.fill_(rank);
        auto norm = net->ptr(1)->as<torch::nn::BatchNorm1d>();
        norm->running_mean.fill_(rank);
        norm->num_batches_tracked.fill_(3 + session.world_rank());
        { const auto evaluation = session.evaluation(net); }
        EXPECT_EQ(seen[0].item<double>(), rank);
        EXPECT_NEAR(norm->running_mean[0].item<double>(), (session.world_size() - 1) / 2.0, 1e-6);
        EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 3);
        norm->running_mean.fill_(rank);
        session.report({{"a", 1}}, session.state({{"model", net}}));
        EXPECT_EQ(seen[0].item<double>(), rank) << "after a report too";
      });
  EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
  ASSERT_TRUE(result->checkpoint);
  const auto saved = result->checkpoint->to_dict();
  EXPECT_EQ(saved.tensors.at("model/seen")[0].item<double>(), 0) << "rank 0's";
  EXPECT_NEAR(saved.tensors.at("model/1.running_mean")[0].item<double>(), (world().size() - 1) / 2.0, 1e-6);
  const auto log = detail::read_file(storage / "buffers" / "logs" / "rank_00000.log");
  EXPECT_EQ(log.find("model/seen") != std::string::npos, world().size() > 1) << log;
}

TEST(Train, ADifferenceInStatisticsOfBatchNormSaysWhereItComesFrom) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const auto storage = test::shared_folder();
  const auto [code, result] =
      run({storage, {"--log-level", "warn"}, with_line("statistics")}, [](Session& session, const Config&) {
        torch::nn::BatchNorm1d norm(2);
        norm->running_mean.fill_(session.world_rank());
        session.report({{"a", 1}}, session.state({{"norm", norm}}));
      });
  EXPECT_EQ(code, 0);
  const auto log = detail::read_file(storage / "statistics" / "logs" / "rank_00000.log");
  for (const char* part : {"norm/running_mean", "running statistics", "session.evaluation", "prepare_model"})
    EXPECT_NE(log.find(part), std::string::npos) << log;
}

TEST(Train, TorchConfigIsRefusedWhereItHasNoEffect) {
  const auto storage = test::shared_folder();
  int trained = 0;
  const auto loop = [&](Session&) { ++trained; };
  const auto refused = [&](const std::function<Result(Launch&)>& fit) {
    const auto [code, result] = test::launch({storage}, fit);
    EXPECT_EQ(code, static_cast<int>(ExitCode::usage));
  };
  auto options = with_line("torch_config");
  options.torch_config.timeout = std::chrono::seconds(77);
  refused([&](Launch& launch) { return DataParallelTrainer(launch, loop, options).fit(); });
  struct None : BackendConfig {
    std::unique_ptr<Backend> make_backend() const override { return std::make_unique<Backend>(); }
  };
  options.backend_config = std::make_shared<None>();
  refused([&](Launch& launch) { return TorchTrainer(launch, loop, options).fit(); });
  EXPECT_EQ(trained, 0);
  options.torch_config = {};
  EXPECT_EQ(
      test::launch({storage}, [&](Launch& launch) { return DataParallelTrainer(launch, loop, options).fit(); }).first,
      0);
  EXPECT_EQ(trained, 1);
}

TEST(Train, CallbacksAndBackendsAreCalled) {
  struct Counter : Callback {
    void on_report(const Json& row) override { seen.push_back(row.at("training_iteration")); }
    std::vector<int> seen;
  };
  auto options = with_line("callbacks");
  const auto counter = std::make_shared<Counter>();
  options.run_config.callbacks = {counter};
  Fit fit;
  run({test::shared_folder(), {}, options}, [&](Session& session, const Config&) { fit_line(session, 1, fit); });
  ASSERT_GE(counter->seen.size(), 2u);
  for (std::size_t i = 0; i < counter->seen.size(); ++i) EXPECT_EQ(counter->seen[i], static_cast<int>(i) + 1);
}

/// What rank 0 has in its log. Collective.
std::string log_of(const std::filesystem::path& run) { return detail::read_file(run / "logs" / "rank_00000.log"); }

TEST(Train, WhatBeginsAgainAfterLoadingByHandIsSaid) {
  const auto storage = test::shared_folder();
  Fit fit;
  auto options = with_line("by_hand");
  options.train_loop_config = {{"again", false}};
  const auto train = [&](Session& session, const Config& config) {
    if (config.at("again")) {
      ASSERT_TRUE(session.get_checkpoint());
      for ([[maybe_unused]] auto epoch : session.epochs(1))
        for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches()) {
        }
    } else {
      fit_line(session, 1, fit);
    }
  };
  const std::vector<std::string> loud{"--log-level", "warn", "--set", "again=true"};
  EXPECT_EQ(run({storage, {}, options}, train).first, 0);
  EXPECT_EQ(run({storage, loud, options}, train).first, 0);
  const auto log = log_of(storage / "by_hand");
  for (const char* word : {"epoch, global_step", "position in the data", "random state", "state.restore()"})
    EXPECT_NE(log.find(word), std::string::npos) << word << " in: " << log;
  EXPECT_EQ(log.find("begin again"), log.rfind("begin again")) << "once";
}

TEST(Train, ASecondLoopToTheSameCountSaysWhyItHasNoEpoch) {
  const auto storage = test::shared_folder();
  const auto log_after = [&](const std::string& name, std::int64_t second) {
    std::int64_t epochs = 0;
    const auto [code, result] =
        run({storage, {"--log-level", "warn"}, with_line(name)}, [&](Session& session, const Config&) {
          for ([[maybe_unused]] auto epoch : session.epochs(3)) ++epochs;
          for ([[maybe_unused]] auto epoch : session.epochs(second)) ++epochs;
        });
    EXPECT_EQ(code, 0);
    EXPECT_EQ(epochs, second);
    return log_of(storage / name);
  };
  const auto log = log_after("again", 3);
  for (const char* part : {"session.epochs(3)", "3 epochs", "session.epochs(3 + n)"})
    EXPECT_NE(log.find(part), std::string::npos) << part << " in: " << log;
  EXPECT_EQ(log_after("longer", 5).find("epochs("), std::string::npos);
}

TEST(Train, ASecondEpochLoopGoesOnAfterTheFirst) {
  const auto storage = test::shared_folder();
  std::vector<std::int64_t> seen;
  const auto train = [&](bool fails) {
    return [&, fails](Session& session, const Config&) {
      std::int64_t passes = 0;
      auto state = session.state({{"passes", passes}});
      state.restore();
      const auto shard = session.get_dataset_shard();
      const auto pass = [&](std::int64_t epoch) {
        for ([[maybe_unused]] auto& batch : shard.iter_torch_batches({.batch_size = 4})) continue;
        seen.push_back(epoch);
        ++passes;
      };
      for (auto epoch : session.epochs(2)) pass(epoch);
      session.report({{"passes", passes}}, state);
      if (fails) throw std::runtime_error("between the loops");
      for (auto epoch : session.epochs(2)) pass(epoch);
      for (auto epoch : session.epochs(9)) {
        pass(epoch);
        if (epoch == 3) break;
      }
      for (auto epoch : session.epochs(5)) pass(epoch);
      EXPECT_EQ(passes, 6);
    };
  };
  const std::vector<std::int64_t> want{0, 1, 2, 3, 3, 4};
  EXPECT_EQ(run({storage, {}, with_line("straight")}, train(false)).first, 0);
  EXPECT_EQ(seen, want);
  seen.clear();
  EXPECT_EQ(run({storage, {}, with_line("resumed")}, train(true)).first, 1);
  EXPECT_EQ(run({storage, {}, with_line("resumed")}, train(false)).first, 0);
  EXPECT_EQ(seen, want);
}

TEST(Train, AnEpochLoopOfOnesOwnCountsAsEpochsDo) {
  const auto storage = test::shared_folder();
  auto options = with_line("own");
  options.datasets.emplace("test", line());
  options.dataset_config.split_all = true;
  std::vector<double> weights;
  const auto train = [&](std::int64_t fails_at) {
    return [&, fails_at](Session& session, const Config&) {
      auto net = session.prepare_model(torch::nn::Linear(1, 1));
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      std::int64_t first = 0;
      auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"first", first}});
      state.restore();
      auto shard = session.get_dataset_shard("train"), validation = session.get_dataset_shard("test");
      for (auto epoch = first; epoch < 3; ++epoch) {
        shard.set_epoch(epoch);
        for (auto& batch : shard.iter_torch_batches({.global_batch_size = 8, .shuffle = true})) {
          optimizer.zero_grad();
          torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
          optimizer.step();
          if (session.global_step() % 6 == 3) first = epoch, session.report({{"middle", 1}}, state);
          if (session.global_step() == fails_at) throw std::runtime_error("stopped here");
        }
        std::int64_t samples = 0;
        {
          const auto evaluation = session.evaluation(net);
          for (auto& batch : validation.iter_torch_batches()) samples += batch.size();
        }
        first = epoch + 1;
        session.report({{"samples", Metric(double(samples), 1)}, {"tested", samples > 0}}, state);
        EXPECT_GT(samples, 0);
      }
      weights = {net->weight.item<double>(), net->bias.item<double>()};
    };
  };
  const auto straight = run({storage, {"--name", "straight"}, options}, train(0));
  EXPECT_EQ(straight.first, 0);
  std::vector<std::int64_t> epochs;
  for (const auto& row : straight.second->metrics_history) epochs.push_back(row.at("epoch"));
  EXPECT_EQ(epochs, (std::vector<std::int64_t>{0, 0, 1, 1, 2, 2}));
  const auto want = weights;
  EXPECT_EQ(run({storage, {}, options}, train(10)).first, 1);
  EXPECT_EQ(run({storage, {}, options}, train(0)).first, 0);
  EXPECT_EQ(weights, want);
}

TEST(Train, ASessionKnowsItsPlaceAndItsRun) {
  static_assert(std::derived_from<TorchTrainer, DataParallelTrainer>);
  auto options = with_line("named");
  options.metadata = {{"key", 1}};
  const auto [code, result] = run({test::shared_folder(), {}, options}, [](Session& session, const Config&) {
    const auto& topology = world().topology();
    EXPECT_EQ(session.world_size(), world().size());
    EXPECT_EQ(session.world_rank(), world().rank());
    EXPECT_EQ(session.local_rank(), topology.local_rank);
    EXPECT_GE(session.local_rank(), 0);
    EXPECT_LT(session.local_rank(), session.local_world_size());
    EXPECT_EQ(session.num_nodes(), topology.num_nodes);
    EXPECT_EQ(session.node_rank(), topology.node_rank);
    EXPECT_EQ(session.get_device(), at::Device(at::kCPU));
    EXPECT_EQ(session.process_group()->getSize(), session.world_size());
    EXPECT_EQ(session.process_group()->getBackend(c10::kCPU)->getBackendName(), "muster") << "over MPI unless said";
    session.barrier();
    EXPECT_EQ(session.trial_name(), "named");
    EXPECT_EQ(session.experiment_name(), "named");
    EXPECT_EQ(session.metadata(), Json({{"key", 1}}));
    EXPECT_FALSE(session.get_checkpoint());
  });
  EXPECT_EQ(code, 0) << (result && result->error ? result->error->what() : "");
}

TEST(Train, OfAHostThatOnlyWaitsNothingIsAsked) {
  if (world().size() == 1) GTEST_SKIP() << "nobody waits";
  auto options = with_line("waiting");
  options.scaling_config.num_workers = 1;
  if (world().rank() > 0) options.datasets.at("train") = Dataset("/nonexistent/here.h5");
  Fit fit;
  EXPECT_EQ(
      run({test::shared_folder(), {}, options}, [&](Session& session, const Config&) { fit_line(session, 1, fit); })
          .first,
      0);
}

TEST(Train, AFittedPreprocessorStaysAsItIs) {
  const auto other = Dataset::from_tensors({{"x", torch::arange(5.0).unsqueeze(1)}, {"y", torch::ones({5, 1})}});
  const auto scaler = standard_scaler({"x"}), second = min_max_scaler({"y"});
  scaler->fit(other, world());
  const auto before = scaler->state();
  const auto storage = test::shared_folder();
  auto options = with_line("fitted");
  options.preprocessor = chain({scaler, second});
  const auto nothing = [](Session&, const Config&) {};
  EXPECT_EQ(run({storage, {}, options}, nothing).first, 0);
  EXPECT_EQ(scaler->state(), before);
  EXPECT_TRUE(second->fitted()) << "the rest of the chain is fitted";
  // Without anything to fit on.
  options.run_config.name = "elsewhere";
  options.datasets = {{"test", line()}};
  EXPECT_EQ(run({storage, {}, options}, nothing).first, 0);
  EXPECT_EQ(scaler->state(), before);
  options.run_config.name = "unfitted";
  options.preprocessor = standard_scaler({"x"});
  EXPECT_EQ(run({storage, {}, options}, nothing).first, 1);
}

TEST(Train, APreprocessorIsTheRunsOwn) {
  const auto other = Dataset::from_tensors({{"x", torch::arange(5.0).unsqueeze(1)}});
  const auto of_other = standard_scaler({"x"}), of_line = standard_scaler({"x"});
  of_other->fit(other, world());
  of_line->fit(line(), world());
  const auto storage = test::shared_folder();
  const auto train = [&](Session& session, const Config&) {
    std::int64_t n = 0;
    auto state = session.state({{"n", n}});
    state.restore();
    session.report({{"n", ++n}}, state);
    if (n == 1) throw std::runtime_error("not yet");
  };
  auto options = with_line("first");
  options.preprocessor = standard_scaler({"x"});
  EXPECT_EQ(run({storage, {}, options}, train).first, 1);
  options.preprocessor = nullptr;
  const auto without = run({storage, {}, options}, train);
  EXPECT_EQ(without.first, 64) << "the data would be other data without a word";
  EXPECT_NE(std::string(without.second->error->what()).find("saved with one"), std::string::npos);
  options.preprocessor = of_other;
  const auto first = run({storage, {}, options}, train);
  EXPECT_EQ(first.first, 0);
  EXPECT_EQ(of_other->state(), of_line->state()) << "the run's own";
  of_other->fit(other, world());
  const auto before = of_other->state();
  options.resume_from_checkpoint = first.second->checkpoint;
  for (const auto& [name, scaler] : {std::pair("fitted", of_other), std::pair("unfitted", standard_scaler({"x"}))}) {
    options.run_config.name = name;
    options.preprocessor = scaler;
    const auto [code, result] = run({storage, {}, options}, train);
    EXPECT_EQ(code, 0);
    EXPECT_EQ(scaler->state(), name == std::string("fitted") ? before : of_line->state());
    EXPECT_EQ(result->metrics.at("training_iteration"), 1) << "another run's reports are not its own";
  }
}

TEST(Train, APreprocessorOfTwoTrainersIsFittedOnceOnAllRanksAndAtAllStarts) {
  const auto storage = test::shared_folder();
  auto first = with_line("first");
  const int workers = std::max(1, world().size() - 1);  // the last rank only waits
  first.scaling_config.num_workers = workers;
  auto second = first;
  second.run_config.name = "second";
  second.datasets = {{"train", Dataset::from_tensors({{"x", torch::arange(5.0).unsqueeze(1)}})}};
  second.scaling_config.num_workers = world().size();
  Json learned;
  for (const bool again : {false, true}) {
    const auto scaler = standard_scaler({"x"});
    first.preprocessor = second.preprocessor = scaler;
    int trained = 0;
    const auto [code, result] = test::launch({storage}, [&](Launch& launch) {
      TorchTrainer(
          launch,
          [&](Session& session, const Config&) {
            ++trained;
            auto state = session.state({});
            session.report({{"a", 1}}, state);
          },
          first)
          .fit();
      EXPECT_TRUE(scaler->fitted()) << "on rank " << world().rank();
      if (!again) learned = scaler->state();
      EXPECT_EQ(scaler->state(), learned);
      return TorchTrainer(
                 launch,
                 [&](Session&, const Config&) {
                   if (!again) throw std::runtime_error("not yet");
                 },
                 second)
          .fit();
    });
    EXPECT_EQ(code, again ? 0 : 1);
    EXPECT_EQ(trained, !again && world().rank() < workers ? 1 : 0);
    EXPECT_EQ(scaler->state(), learned) << "the second trainer leaves it as it is";
  }
}

TEST(Train, IsRestoredWhereTheFlagsSayToo) {
  const auto storage = test::shared_folder();
  const auto train = [&](Session& session, const Config&) {
    std::int64_t n = 0;
    auto state = session.state({{"n", n}});
    EXPECT_EQ(session.world_size(), world().size());
    state.restore();
    session.report({{"n", ++n}}, state);
    if (n == 1) throw std::runtime_error("not yet");
    EXPECT_THROW(state.restore(), Error) << "a report has saved another";
  };
  EXPECT_EQ(run({storage, {}, with_line("run")}, train).first, 1);
  const auto restore = [&](const std::filesystem::path& named, const std::vector<std::string>& flags) {
    return test::launch({named, flags}, [&](Launch& launch) {
      return TorchTrainer::restore(launch, storage / "run", train, {.datasets = {{"train", line()}}}).fit();
    });
  };
  EXPECT_EQ(restore(storage / "elsewhere", {}).first, 64);
  EXPECT_EQ(restore(storage, {"--name", "other"}).first, 64);
  EXPECT_EQ(restore(storage / "." / "", {"--name", "run"}).first, 0) << "the same folder";
}

/// Says what it was asked to do.
struct Witness : Backend {
  explicit Witness(std::vector<std::string>& words) : said(words) {}
  void on_start(Session&) override { said.push_back("start"); }
  void on_training_start(Session&) override { said.push_back("training_start"); }
  void on_shutdown(Session& session) override {
    said.push_back(session.failed() ? "failed" : "shutdown");
    if (session.failed()) throw std::runtime_error("nor can this be shut down");
    session.barrier();
  }
  std::vector<std::string>& said;
};

struct WitnessConfig : BackendConfig {
  std::unique_ptr<Backend> make_backend() const override { return std::make_unique<Witness>(said); }
  mutable std::vector<std::string> said = {};
};

TEST(Train, BackendsAreShutDownAfterAnExceptionToo) {
  const auto config = std::make_shared<WitnessConfig>();
  int attempts = 0;
  const auto [code, result] = test::launch({test::shared_folder()}, [&](Launch& launch) {
    const auto train = [&](Session& session, const Config&) {
      config->said.push_back("train");
      if (++attempts == 1 && session.world_rank() == 0) throw std::runtime_error("the cause");
      session.barrier();
    };
    return DataParallelTrainer(
               launch, train,
               {.backend_config = config, .run_config = {.name = "witness", .failure_config = {.max_failures = 1}}})
        .fit();
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(config->said, (std::vector<std::string>{"start", "training_start", "train", "failed", "start",
                                                    "training_start", "train", "shutdown"}));
}

TEST(Train, SetupMayChangeEveryOption) {
  struct Own : DataParallelTrainer {
    using DataParallelTrainer::DataParallelTrainer;
    void setup() override {
      options_.train_loop_config = {{"lr", 0.5}};
      options_.run_config.name = "own";
      options_.scaling_config.num_workers = 1;
      options_.datasets.emplace("train", line());
    }
  };
  const auto storage = test::shared_folder();
  const auto [code, result] = test::launch({storage, {"--set", "lr=2"}}, [&](Launch& launch) {
    return Own(launch,
               [](Session& session, const Config& config) {
                 EXPECT_EQ(config.at("lr"), 2);
                 EXPECT_EQ(session.world_size(), 1);
                 EXPECT_EQ(session.get_dataset_shard("train").count(), 46);
               })
        .fit();
  });
  EXPECT_EQ(code, 0);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->path, storage / "own");
}

TEST(Train, ThreadsAreThoseAskedForWithAnyBackend) {
  const auto storage = test::shared_folder();
  const int before = torch::get_num_threads();
  for (const int threads : {3, 2}) {
    const auto [code, result] = test::launch({storage, {"--threads", std::to_string(threads)}}, [&](Launch& launch) {
      return DataParallelTrainer(launch, [&](Session&, const Config&) { EXPECT_EQ(torch::get_num_threads(), threads); },
                                 {.run_config = {.name = "threads_" + std::to_string(threads)}})
          .fit();
    });
    EXPECT_EQ(code, 0);
  }
  torch::set_num_threads(before);
}

TEST(Train, WhatCannotBeInARunsFilesIsDamageOnAllRanks) {
  const auto storage = test::shared_folder();
  Fit fit;
  const auto train = [&](Session& session, const Config&) { fit_line(session, 2, fit); };
  run({storage, {}, with_line("forged")}, train);
  const auto folder = storage / "forged";
  const auto change = [&](const std::filesystem::path& file, const std::function<std::string(std::string)>& how) {
    world().barrier();
    if (world().rank() == 0) {
      const auto text = how(detail::read_file(file));
      std::filesystem::remove(file);
      detail::write_file(file, text);
    }
    world().barrier();
  };
  const auto again = [&] {
    return run({storage, {"--resume", "must"}, with_line("forged")}, [](Session&, const Config&) {}).first;
  };
  // The newest checkpoint: the one before it is taken.
  const auto all = list_checkpoints(folder);
  const auto newest = all.back().path;
  change(newest / "manifest.json", [&](const std::string&) {
    return test::forge(newest, [](Json& json) { json["progress"]["epoch_complete"] = 1.5; });
  });
  EXPECT_EQ(again(), 0);
  auto left = list_checkpoints(folder);
  EXPECT_EQ(std::erase_if(left, [](const CheckpointInfo& info) { return !info.problem.empty(); }), 1U);
  EXPECT_EQ(left.size(), all.size() - 1);
  // The other two are refused until they are mended.
  for (const char* name : {"params.json", "result.json"}) {
    std::string was;
    change(folder / name, [&](std::string text) {
      was = text;
      return name[0] == 'p' ? std::string(text).replace(text.find("\"finished\": true"), 16, "\"finished\": \"yes\"")
                            : R"({"training_iteration": "1"})"
                              "\n" +
                                  text;
    });
    EXPECT_EQ(again(), 65) << name;
    change(folder / name, [&](const std::string&) { return was; });
    EXPECT_EQ(again(), 0) << name;
  }
}

/// Trains, failing after `steps` if that is not 0; the index of the checkpoint that it began with, −1 for none.
int continue_line(const std::filesystem::path& storage, const std::string& name, std::vector<std::string> flags,
                  std::int64_t epochs, std::int64_t steps = 0, int max_failures = 0) {
  int began_with = -2;
  auto options = with_line(name);
  options.run_config.failure_config.max_failures = max_failures;
  Fit fit;
  const auto [code, result] = run({storage, std::move(flags), options}, [&](Session& session, const Config&) {
    const auto checkpoint = session.get_checkpoint();
    began_with = checkpoint ? std::stoi(checkpoint->path().filename().string().substr(11)) : -1;
    const auto first = session.global_step();
    fit_line(session, epochs, fit, [&](std::int64_t at) {
      if (steps > 0 && at - first >= steps) throw std::runtime_error("enough");
    });
  });
  EXPECT_EQ(code, steps > 0 ? 1 : 0) << (result && result->error ? result->error->what() : "");
  return began_with;
}

std::filesystem::path checkpoint_of(const std::filesystem::path& folder, int index) {
  char name[32];
  std::snprintf(name, sizeof name, "checkpoint_%06d", index);
  return folder / name;
}

int newest_index(const std::filesystem::path& folder) {
  world().barrier();
  const int index = list_checkpoints(folder).back().index;
  world().barrier();
  return index;
}

TEST(Train, AListForAllIsNotEachRanksOwn) {
  const auto storage = test::shared_folder();
  for (const bool of_each : {false, true}) {
    const auto options = with_line(of_each ? "of_each" : "for_all");
    auto labels = Json::array();
    for (int rank = 0; rank < world().size(); ++rank) labels.push_back(rank);
    const auto saved = run({storage, {}, options}, [&](Session& session, const Config&) {
      session.report({}, of_each ? session.state({{"labels", per_rank(labels)}}) : session.state({{"labels", labels}}));
      throw std::runtime_error("not done");
    });
    EXPECT_EQ(saved.first, 1);
    const auto before = labels;
    const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
      auto state = of_each ? session.state({{"labels", labels}}) : session.state({{"labels", per_rank(labels)}});
      state.restore();
    });
    EXPECT_EQ(code, 65);
    EXPECT_EQ(labels, before);
  }
}

TEST(Train, AResultIsReadWhileItsRunGoesOn) {
  const auto storage = test::shared_folder();
  continue_line(storage, "live", {}, 1);
  world().barrier();
  if (world().rank() != 0) return;
  const auto newest = list_checkpoints(storage / "live").back().path;
  const auto hidden = newest.parent_path() / ("." + newest.filename().string() + ".pruning");
  std::atomic<bool> is_done = false;
  std::thread job([&] {  // publishes and prunes
    while (!is_done) {
      std::filesystem::rename(newest, hidden);
      std::filesystem::rename(hidden, newest);
    }
  });
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(Result::from_path(storage / "live").checkpoint);
  is_done = true;
  job.join();
}

TEST(Train, AStorageThroughALinkIsOneFolder) {
  const auto folder = test::shared_folder();
  if (world().rank() == 0) {
    std::filesystem::create_directories(folder / "elsewhere/target");
    std::filesystem::create_directory_symlink("elsewhere/target", folder / "link");
  }
  world().barrier();
  const auto [code, result] = run({folder / "link/../runs", {}, with_line("")}, [](Session&, const Config&) {});
  EXPECT_EQ(code, 0);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->path.parent_path(), folder / "runs");
  EXPECT_FALSE(std::filesystem::exists(folder / "elsewhere/runs"));
}

TEST(Train, AStepBackIsTakenOnce) {
  const auto storage = test::shared_folder();
  const auto folder = storage / "back";
  continue_line(storage, "back", {}, 3);
  const int last = newest_index(folder);
  ASSERT_GE(last, 4);
  const std::vector<std::string> back{"--resume", (folder / "checkpoint_000001/").string()};
  const auto nothing = [&](const std::vector<std::string>& flags, bool restores = false) {
    int began_with = -2;
    run({storage, flags, with_line("back")}, [&](Session& session, const Config&) {
      began_with = std::stoi(session.get_checkpoint()->path().filename().string().substr(11));
      if (restores) {
        auto net = session.prepare_model(line_net());
        torch::optim::Adam optimizer(net->parameters(), 0.05);
        session.state({{"model", net}, {"optimizer", optimizer}}).restore();
      }
      throw std::runtime_error("before anything is saved");
    });
    return began_with;
  };
  // It fails before it has taken anything up, and nothing is changed.
  EXPECT_EQ(nothing(back), 1);
  EXPECT_EQ(nothing({}), last);
  // Nothing newer is saved: it starts from there again, with the flag and without.
  EXPECT_EQ(nothing(back, true), 1);
  EXPECT_EQ(nothing(back), 1);
  EXPECT_EQ(nothing({}), 1);
  EXPECT_EQ(newest_index(folder), last) << "what was given up stays on disk";
  // A newer one is saved: from then on it starts from the newest.
  const auto saved = run({storage, back, with_line("back")}, [&](Session& session, const Config&) {
    double value = 1;
    session.report({{"loss", 1}}, session.state({{"value", value}}));
  });
  EXPECT_EQ(saved.first, 0);
  EXPECT_EQ(saved.second->checkpoint->path(), checkpoint_of(folder, last + 1));
  EXPECT_EQ(nothing(back), last + 1);
  // Also when the one that it went back to is gone, and never from one that was given up.
  world().barrier();
  if (world().rank() == 0) std::filesystem::remove_all(folder / "checkpoint_000001");
  EXPECT_EQ(nothing(back), last + 1);
  world().barrier();
  if (world().rank() == 0) std::filesystem::remove(checkpoint_of(folder, last + 1) / "state.h5");
  EXPECT_EQ(nothing(back), 0);
}

TEST(Train, AStepBackToWhatWasGivenUpHasNoReportsOfTheOtherCourse) {
  const auto storage = test::shared_folder();
  const auto folder = storage / "courses";
  // Reports `count` times, with a checkpoint every second time.
  const auto report = [&](const std::vector<std::string>& flags, const std::string& course, int count) {
    return run({storage, flags, with_line("courses")},
               [&](Session& session, const Config&) {
                 std::int64_t reports = 0;
                 auto state = session.state({{"reports", reports}});
                 state.restore();
                 while (count-- > 0) {
                   if (++reports % 2 == 0)
                     session.report({{"course", Json(course)}}, state);
                   else
                     session.report({{"course", Json(course)}});
                 }
                 throw std::runtime_error("not done");
               })
        .second;
  };
  const auto courses = [](const std::optional<Result>& result) {
    std::string text;
    for (const auto& row : result->metrics_history) text += row.at("course").get<std::string>();
    return text;
  };
  EXPECT_EQ(courses(report({}, "a", 6)), "aaaaaa");
  const auto back_to = [&](int index) { return std::vector<std::string>{"--resume", checkpoint_of(folder, index)}; };
  EXPECT_EQ(courses(report(back_to(0), "b", 3)), "aabbb");
  // Checkpoint 1 is that of report 4; reports 3 of its course are gone.
  const auto back = report(back_to(1), "c", 1);
  EXPECT_EQ(courses(back), "aaac");
  EXPECT_EQ(back->metrics_history[2].at("training_iteration"), 4);
  EXPECT_EQ(courses(report({}, "d", 2)), "aaadd");
}

TEST(Train, AStepBackToASaveBetweenTwoReportsHasItsOwnHistory) {
  const auto storage = test::shared_folder();
  const auto folder = storage / "back";
  continue_line(storage, "back", {}, 3, 9);
  Fit fit;
  const auto stopped = run({storage, {"--time-limit", "0"}, with_line("back")},
                           [&](Session& session, const Config&) { fit_line(session, 3, fit); });
  EXPECT_EQ(stopped.first, static_cast<int>(ExitCode::stopped));
  const int saved = newest_index(folder);
  EXPECT_EQ(continue_line(storage, "back", {"--resume", checkpoint_of(folder, 0)}, 3, 9), 0);
  const int newest = newest_index(folder);
  EXPECT_EQ(continue_line(storage, "back", {"--resume", checkpoint_of(folder, saved)}, 3), saved);
  for (const auto& row : Result::from_path(folder).metrics_history)
    for (int index = saved + 1; index <= newest; ++index)
      EXPECT_NE(row.at("checkpoint_dir_name"), checkpoint_of(folder, index).filename().string());
}

TEST(Train, ARefusedStartLeavesTheRunAsItWas) {
  const auto storage = test::shared_folder();
  const auto folder = storage / "refused";
  const auto options = [](double lr) {
    auto given = with_line("refused");
    given.train_loop_config["lr"] = lr;
    return given;
  };
  run({storage, {}, options(1)}, [](Session& session, const Config&) {
    double value = 1;
    const auto state = session.state({{"value", value}});
    for (const char* name : {"best", "", "best"}) session.report({{"a", 1}}, state, {.checkpoint_name = name});
    session.report({{"a", 1}});
    throw std::runtime_error("not done");
  });
  const auto content = [&] {
    world().barrier();
    std::string text = std::filesystem::read_symlink(folder / "best").string();
    for (const char* name : {"params.json", "result.json", "progress.csv"}) text += detail::read_file(folder / name);
    world().barrier();
    return text;
  };
  const auto before = content();
  for (const std::vector<std::string>& flags : {std::vector<std::string>{"--resume", checkpoint_of(folder, 0)}, {}}) {
    std::size_t reported = 0;
    const auto refused = run({storage, flags, options(2)}, [&](Session& session, const Config&) {
      reported = session.get_all_reported_checkpoints().size();
      double other = 1;
      session.state({{"other", other}}).restore();
    });
    EXPECT_EQ(refused.first, 65);
    EXPECT_EQ(reported, flags.empty() ? 3u : 1u) << "those that led to where the run goes on";
    EXPECT_EQ(content(), before);
  }
}

TEST(Train, ARunThatHasGoneBackIsNotFinished) {
  const auto storage = test::shared_folder();
  continue_line(storage, "back", {}, 3);
  const auto train = [&](const std::vector<std::string>& flags, bool fails) {
    int began_with = -2;
    run({storage, flags, with_line("back")}, [&](Session& session, const Config&) {
      began_with = std::stoi(session.get_checkpoint()->path().filename().string().substr(11));
      Fit fit;
      fit_line(session, 3, fit, [&](std::int64_t) {
        if (fails) throw Error(ExitCode::data, "training", "there is a bad sample");
      });
    });
    return began_with;
  };
  EXPECT_EQ(train({"--resume", checkpoint_of(storage / "back", 0)}, true), 0);
  EXPECT_EQ(train({}, false), 0) << "it goes on from there";
}

/// Two checkpoints of a run "seed" with the values 1 and 2; `seed/link` leads to the first.
std::filesystem::path make_seed(const std::filesystem::path& storage) {
  run({storage, {}, with_line("seed")}, [](Session& session, const Config&) {
    double value = 0;
    const auto state = session.state({{"value", value}});
    while (++value < 3) session.report({{"a", 1}}, state);
  });
  if (world().rank() == 0) std::filesystem::create_directory_symlink("checkpoint_000000", storage / "seed" / "link");
  world().barrier();
  return storage / "seed";
}

TEST(Train, ASeedStaysTheSameUntilAllOfItIsRestored) {
  const auto storage = test::shared_folder();
  const auto seed = make_seed(storage);
  auto options = with_line("seeded");
  options.resume_from_checkpoint = Checkpoint::from_directory(seed / "link");
  const auto by_rank_0 = [](const std::function<void()>& work) {
    world().barrier();
    if (world().rank() == 0) work();
    world().barrier();
  };
  const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
    double value = 0;
    auto state = session.state({{"value", value}});
    EXPECT_TRUE(state.restore());
    EXPECT_EQ(value, 1);
    by_rank_0([&] {
      std::filesystem::remove(seed / "link");
      std::filesystem::create_directory_symlink("checkpoint_000001", seed / "link");
    });
    EXPECT_TRUE(state.restore());
    EXPECT_EQ(value, 1) << "the link leads elsewhere now";
    by_rank_0([&] { std::filesystem::rename(checkpoint_of(seed, 0), seed / "gone"); });
    state.restore();
    ADD_FAILURE() << "the seed is gone";
  });
  EXPECT_EQ(code, static_cast<int>(ExitCode::retry));
  by_rank_0([&] { std::filesystem::rename(checkpoint_of(seed, 1), checkpoint_of(seed, 0)); });
  EXPECT_EQ(run({storage, {}, options}, [](Session&, const Config&) { FAIL(); }).first,
            static_cast<int>(ExitCode::retry))
      << "another checkpoint has its name now";
}

TEST(Train, ASeedIsTheSameOnAllRanks) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const auto storage = test::shared_folder();
  const auto seed = make_seed(storage);
  auto options = with_line("seeded");
  options.resume_from_checkpoint = Checkpoint::from_directory(checkpoint_of(seed, world().rank() == 0 ? 0 : 1));
  EXPECT_EQ(run({storage, {}, options}, [](Session&, const Config&) { FAIL(); }).first,
            static_cast<int>(ExitCode::retry));
}

TEST(Train, AStepBackToNowhereIsRefused) {
  const auto storage = test::shared_folder();
  continue_line(storage, "back", {}, 1);
  const auto to = [&](const std::string& name) {
    return run({storage, {"--resume", (storage / "back" / name).string()}, with_line("back")},
               [](Session&, const Config&) { FAIL(); })
        .first;
  };
  EXPECT_EQ(to("checkpoint_000077"), 65);
  EXPECT_EQ(to("checkpoint_1"), 65);
  EXPECT_EQ(to("logs"), 65);
  world().barrier();
  if (world().rank() == 0) std::filesystem::resize_file(storage / "back/checkpoint_000000/state.h5", 100);
  world().barrier();
  EXPECT_EQ(to("checkpoint_000000"), 65);
  EXPECT_TRUE(std::filesystem::exists(storage / "back/checkpoint_000000")) << "a wish condemns nothing";
}

TEST(Train, RetriesAfterAStepBackStartFromTheNewest) {
  const auto storage = test::shared_folder();
  continue_line(storage, "back", {}, 3);
  const int last = newest_index(storage / "back");
  std::vector<int> began_with;
  auto options = with_line("back");
  options.run_config.failure_config.max_failures = 2;
  const auto [code, result] =
      run({storage, {"--resume", (storage / "back/checkpoint_000000").string()}, options},
          [&](Session& session, const Config&) {
            began_with.push_back(std::stoi(session.get_checkpoint()->path().filename().string().substr(11)));
            double value = 1;
            if (began_with.size() == 2) session.report({{"loss", 1}}, session.state({{"value", value}}));
            if (began_with.size() < 3) throw std::runtime_error("a passing trouble");
          });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(began_with, (std::vector<int>{0, 0, last + 1}));
}

TEST(Train, AStepBackByANameIsNotTakenAgainWhenTheNameLeadsElsewhere) {
  const auto storage = test::shared_folder();
  const auto folder = storage / "back";
  continue_line(storage, "back", {}, 3);
  const int last = newest_index(folder);
  if (world().rank() == 0) std::filesystem::create_directory_symlink("checkpoint_000000", folder / "best");
  world().barrier();
  std::vector<int> began_with;
  auto options = with_line("back");
  options.run_config.failure_config.max_failures = 2;
  const auto start = [&](bool saves) {
    return run({storage, {"--resume", (folder / "best").string()}, options},
               [&](Session& session, const Config&) {
                 began_with.push_back(std::stoi(session.get_checkpoint()->path().filename().string().substr(11)));
                 double value = 1;
                 const auto state = session.state({{"value", value}});
                 if (began_with.size() > 1) return;
                 if (saves) session.report({{"loss", 1}}, state, {.checkpoint_name = "best"});
                 if (saves) session.report({{"loss", 2}}, state);
                 throw std::runtime_error("a passing trouble");
               })
        .first;
  };
  EXPECT_EQ(start(true), 0);
  world().barrier();
  if (world().rank() == 0) std::filesystem::remove(folder / "best");
  world().barrier();
  EXPECT_EQ(start(false), 0) << "the name is gone";
  EXPECT_EQ(began_with, (std::vector<int>{0, last + 2, last + 2}));
}

TEST(Train, ANameOfADamagedCheckpointGoesToTheOneBeforeAndALinkIsNoCheckpoint) {
  const auto storage = test::shared_folder();
  const auto folder = storage / "named";
  const auto start = [&](int reports, bool ends, bool restores = false) {
    return run({storage, {"--log-level", "warn"}, with_line("named")},
               [&](Session& session, const Config&) {
                 double value = 1;
                 auto state = session.state({{"value", value}});
                 if (restores) state.restore();
                 for (int i = 0; i < reports; ++i) session.report({{"a", 1}}, state, {.checkpoint_name = "good"});
                 if (!ends) throw std::runtime_error("not yet");
               })
        .first;
  };
  const auto on_rank_0 = [&](const std::function<void()>& work) {
    world().barrier();
    if (world().rank() == 0) work();
    world().barrier();
  };
  EXPECT_EQ(start(2, false), 1);
  on_rank_0([&] { std::filesystem::resize_file(folder / "checkpoint_000001/state.h5", 100); });
  EXPECT_EQ(start(0, false), 1);
  EXPECT_EQ(std::filesystem::read_symlink(folder / "good"), "checkpoint_000000");
  on_rank_0([&] { std::filesystem::remove(folder / "good"); });  // as if the job had been killed before it was made
  EXPECT_EQ(start(0, false, /*restores=*/true), 1);
  EXPECT_EQ(std::filesystem::read_symlink(folder / "good"), "checkpoint_000000");
  on_rank_0([&] {
    std::filesystem::rename(checkpoint_of(folder, 0), storage / "archived");
    std::filesystem::create_directory_symlink(storage / "archived", checkpoint_of(folder, 0));
    std::filesystem::remove_all(folder / "checkpoint_000001.damaged");
  });
  EXPECT_EQ(start(1, true), 0) << "its number is taken";
  const auto log = detail::read_file(folder / "logs" / "rank_00000.log");
  EXPECT_NE(log.find("checkpoint_000000 is a link or a file"), std::string::npos) << log;
  EXPECT_TRUE(std::filesystem::is_symlink(checkpoint_of(folder, 0)));
}

TEST(Train, WhatIsEachRanksOwnMayShareMemoryOnOneRankAlone) {
  const auto storage = test::shared_folder();
  const auto mine = static_cast<double>(world().rank() + 1);
  for (const bool again : {false, true}) {
    auto now = torch::full({4}, again ? 0 : 10 * mine), best = torch::full({4}, again ? 0 : -mine);
    if (!again && world().rank() == 0) best = now;
    const auto [code, result] = run({storage, {}, with_line("own")}, [&](Session& session, const Config&) {
      auto state = session.state({{"best", per_rank(best)}, {"now", per_rank(now)}});
      EXPECT_EQ(state.restore(), again);
      if (again) return;
      session.report({{"a", 1}}, state);
      throw std::runtime_error("not yet");
    });
    EXPECT_EQ(code, again ? 0 : 1);
    EXPECT_TRUE(torch::equal(now, torch::full({4}, 10 * mine)));
    EXPECT_TRUE(torch::equal(best, torch::full({4}, world().rank() == 0 ? 10 * mine : -mine)));
  }
}

TEST(Train, ASecondTrainerOverTheRunOfTheFirstIsAWarning) {
  const auto storage = test::shared_folder();
  const auto log = [&](const std::string& second) {
    test::launch({storage, {"--log-level", "warn"}}, [&](Launch& launch) {
      const auto nothing = [](Session& session, const Config&) { session.report({{"a", 1}}); };
      TorchTrainer(launch, nothing, with_line("first")).fit();
      return TorchTrainer(launch, nothing, with_line(second)).fit();
    });
    world().barrier();
    return detail::read_file(storage / second / "logs" / "rank_00000.log");
  };
  const char* const warning = "is that of an earlier trainer of this program";
  EXPECT_EQ(log("second").find(warning), std::string::npos);
  EXPECT_NE(log("first").find(warning), std::string::npos);
}

TEST(Train, AnotherRunsLastRowIsNotThisRuns) {
  const auto storage = test::shared_folder();
  Fit fit;
  run({storage, {}, with_line("first")}, [&](Session& session, const Config&) { fit_line(session, 2, fit); });
  auto options = with_line("second");
  options.resume_from_checkpoint = Checkpoint::from_directory(list_checkpoints(storage / "first").back().path);
  const auto [code, result] =
      run({storage, {}, options}, [&](Session& session, const Config&) { fit_line(session, 3, fit); });
  EXPECT_EQ(code, 0);
  ASSERT_FALSE(result->metrics_history.empty());
  for (const auto& row : result->metrics_history) EXPECT_EQ(row.at("epoch"), 2) << row;
  const auto flagged = run({storage, {"--resume", (storage / "first/").string()}, with_line("third")},
                           [](Session& session, const Config&) { EXPECT_TRUE(session.get_checkpoint()); });
  EXPECT_EQ(flagged.first, 0);
  EXPECT_TRUE(flagged.second->metrics_history.empty());
}

TEST(Train, LeftoversGoAtTheNextStart) {
  const auto storage = test::shared_folder();
  const auto folder = storage / "left";
  const auto litter = [&] {
    world().barrier();
    if (world().rank() == 0) {
      detail::make_directories(folder / ".checkpoint_000003.pruning/sub");
      for (const char* name : {"progress.csv.tmp.77.0", "result.json.tmp.77.12", "params.json.tmp.1.2", "mine.tmp.1.2"})
        detail::write_file(folder / name, "half");
    }
    world().barrier();
  };
  const auto expect_clean = [&] {
    world().barrier();
    int left = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      const auto name = entry.path().filename().string();
      left += name.find(".tmp.") != std::string::npos || name.ends_with(".pruning");
    }
    EXPECT_EQ(left, 1) << "the user's own, mine.tmp.1.2";
    world().barrier();
  };
  for (int start = 0; start < 2; ++start) {  // the second finds a finished run
    litter();
    EXPECT_EQ(run({storage, {}, with_line("left")}, [](Session&, const Config&) {}).first, 0);
    expect_clean();
  }
}

TEST(Train, AMisspeltScoreIsAnErrorAtTheFirstCheckpoint) {
  auto options = with_line("score");
  options.run_config.checkpoint_config = {.num_to_keep = 1, .checkpoint_score_attribute = "acuracy"};
  const auto storage = test::shared_folder();
  int reports = 0;
  const auto loop = [&](Session& session, const Config&) {
    double value = 1;
    auto state = session.state({{"value", value}});
    session.report({{"loss", 0.5}});  // saves nothing
    ++reports;
    session.report({{"accuracy", 0.5}}, state);
    ++reports;
  };
  const auto [code, result] = run({storage, {}, options}, loop);
  EXPECT_EQ(code, 64);
  EXPECT_EQ(reports, 1);
  EXPECT_NE(std::string(result->error->what()).find("accuracy"), std::string::npos) << result->error->what();
  EXPECT_EQ(std::string(result->error->what()).find("rank "), std::string::npos) << "the same on all";
  // One that is only sometimes there, or not known yet, is none.
  options.run_config.checkpoint_config.checkpoint_score_attribute = "accuracy";
  const auto sometimes = run({storage, {"--name", "sometimes"}, options}, [&](Session& session, const Config&) {
    double value = 1;
    auto state = session.state({{"value", value}});
    session.report({{"accuracy", std::nan("")}}, state);
    session.report({{"accuracy", 0.75}}, state);
    session.report({{"loss", 0.5}}, state);
    session.report({{"loss", 0.4}}, state);
  });
  EXPECT_EQ(sometimes.first, 0);
  EXPECT_EQ(sometimes.second->best_checkpoints.front().second.at("accuracy"), 0.75);
  // What is measured at the end of an epoch is not known in the middle of it.
  const auto later = run({storage, {"--name", "later"}, options}, [&](Session& session, const Config&) {
    double value = 1;
    auto state = session.state({{"value", value}});
    for ([[maybe_unused]] const auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 8}))
      session.report({{"loss", 0.5}}, state);
    session.report({{"accuracy", 0.25}}, state);
  });
  EXPECT_EQ(later.first, 0);
  EXPECT_EQ(later.second->best_checkpoints.front().second.at("accuracy"), 0.25);
}

TEST(Train, SeveralRunsOfAProgramInASlurmJobHaveNamesOfTheirOwn) {
  ::setenv("SLURM_JOB_ID", "4711", 1);
  const auto storage = test::shared_folder();
  std::vector<std::string> names;
  const auto [code, result] = test::launch({storage}, [&](Launch& launch) {
    const auto fit = [&] {
      return TorchTrainer(launch, [&](Session& session) { names.push_back(session.experiment_name()); }).fit();
    };
    fit();
    return fit();
  });
  ::unsetenv("SLURM_JOB_ID");
  EXPECT_EQ(code, 0);
  EXPECT_EQ(names, (std::vector<std::string>{"job_4711", "job_4711_2"})) << "the second is not taken for the first";
}

TEST(Train, RunsWithoutANameAreNumberedUnderTheFirstOne) {
  const auto storage = test::shared_folder();
  std::vector<std::string> names;
  std::string error;
  test::launch({storage}, [&](Launch& launch) {
    const auto fit = [&](bool stops) {
      return TorchTrainer(launch,
                          [&, stops](Session& session) {
                            names.push_back(session.experiment_name());
                            if (stops && session.world_rank() == 0)
                              std::ofstream(storage / names.back() / "stop") << "";
                            while (stops) session.report({{"a", 1}});
                          })
          .fit();
    };
    fit(false);
    const auto second = std::time(nullptr);
    while (std::time(nullptr) == second) std::this_thread::yield();  // a name taken anew would have another time
    world().barrier();
    const auto result = fit(true);
    error = result.error ? result.error->what() : "";
    return result;
  });
  ASSERT_EQ(names.size(), 2u);
  EXPECT_EQ(names[1], names[0] + "_2");
  EXPECT_NE(error.find("with --name " + names[0] + " to go on"), std::string::npos) << error;
}

TEST(Train, EachTrainerOfAProgramHasARunOfItsOwnUnderOneName) {
  const auto storage = test::shared_folder();
  for (const bool again : {false, true}) {
    std::vector<std::string> names;
    std::vector<double> values;
    int trained = 0;
    const auto [code, result] = test::launch({storage, {"--name", "folds"}}, [&](Launch& launch) {
      std::optional<Result> last;
      for (const double value : {1.0, 2.0}) {
        TorchTrainer trainer(launch, [&, value](Session& session) {
          ++trained;
          names.push_back(session.experiment_name());
          double kept = value;
          auto state = session.state({{"value", kept}});
          session.report({{"value", value}}, state);
        });
        last = trainer.fit();
        EXPECT_EQ(trainer.fit().path, last->path) << "the same trainer goes on with the same run";
        values.push_back(last->metrics.at("value"));
      }
      TorchTrainer own(launch, [&](Session&) { ++trained; }, {.run_config = {.name = "folds"}});
      EXPECT_EQ(own.fit().path, storage / "folds") << "it has chosen the name by itself";
      return *last;
    });
    EXPECT_EQ(code, 0);
    EXPECT_EQ(values, (std::vector{1.0, 2.0}));
    EXPECT_EQ(trained, again ? 0 : 2);
    if (!again) {
      EXPECT_EQ(names, (std::vector<std::string>{"folds", "folds_2"}));
    }
  }
}

TEST(Train, AStepBackIsOneOfTheRunThatItNames) {
  const auto storage = test::shared_folder();
  std::vector<std::vector<std::int64_t>> starts;
  for (const bool back : {false, true}) {
    auto& counts = starts.emplace_back();
    std::vector<std::string> flags{"--name", "folds"};
    if (back) flags.insert(flags.end(), {"--resume", (storage / "folds" / "checkpoint_000000").string()});
    test::launch({storage, flags}, [&](Launch& launch) {
      std::optional<Result> last;
      for (const std::int64_t fold : {0, 10}) {
        std::int64_t count = fold;
        last = TorchTrainer(launch, [&](Session& session) {
                 auto state = session.state({{"count", count}});
                 state.restore();
                 counts.push_back(count);
                 while (count < fold + 3) {
                   ++count;
                   session.report({{"count", count}}, state);
                 }
               }).fit();
      }
      return *last;
    });
  }
  EXPECT_EQ(starts[0], (std::vector<std::int64_t>{0, 10}));
  EXPECT_EQ(starts[1], (std::vector<std::int64_t>{1, 13})) << "the second trainer's run goes on where it stands";
}

TEST(Train, ASickDiskEndsAStartWith75AndCostsNothing) {
  const auto storage = test::shared_folder();
  Fit fit;
  run({storage, {}, with_line("sick")}, [&](Session& session, const Config&) { fit_line(session, 1, fit); });
  const auto all = list_checkpoints(storage / "sick");
  const auto newest = all.back().path;
  world().barrier();
  for (const auto& [name, call] :
       std::map<std::string, std::string>{{"manifest.json", "pread"}, {"state.h5", "madvise"}}) {
    std::optional<test::IoError> sick;
    if (world().rank() == world().size() - 1) sick.emplace(call, name, EIO);
    const auto [code, result] =
        run({storage, {"--resume", "must"}, with_line("sick")}, [](Session&, const Config&) { FAIL(); });
    EXPECT_EQ(code, 75) << name;
  }
  EXPECT_EQ(list_checkpoints(storage / "sick").size(), all.size());
  const auto [code, result] =
      run({storage, {"--resume", "must"}, with_line("sick")},
          [&](Session& session, const Config&) { EXPECT_EQ(session.get_checkpoint()->path(), newest); });
  EXPECT_EQ(code, 0);
}

TEST(Train, ChangesBehindTheReportAreWarnedOf) {
  const auto storage = test::shared_folder();
  const std::string text = "loses the change: ";
  for (const std::string what : {"", "scheduler", "averages", "number", "notes", "loss"})
    for (const bool in_mid_pass : {false, true}) {
      const auto name = "behind_" + what + (in_mid_pass ? "_mid" : "");
      const auto [code, result] =
          run({storage, {"--log-level", "warn"}, with_line(name)}, [&](Session& session, const Config&) {
            auto net = session.prepare_model(torch::nn::Linear(1, 1));
            torch::optim::SGD optimizer(net->parameters(), 0.01);
            torch::optim::StepLR scheduler(optimizer, 1, 0.5);
            EMA averages(net);
            double number = 0;
            Json notes = Json::array();
            Mean loss;
            auto state = session.state({{"net", net},
                                        {"scheduler", scheduler},
                                        {"averages", averages},
                                        {"number", number},
                                        {"notes", notes},
                                        {"loss", loss}});
            const auto change = [&](const std::string& entry) {
              if (entry == "scheduler") scheduler.step();
              if (entry == "averages") averages.update();
              if (entry == "number") ++number;
              if (entry == "notes") notes.push_back(number);
              if (entry == "loss") loss.reset();
            };
            for ([[maybe_unused]] auto epoch : session.epochs(2)) {
              change("loss");  // a resumed run does so, too
              for (auto& batch : session.get_dataset_shard().iter_torch_batches({.global_batch_size = 10})) {
                loss.add(net->forward(batch["x"]).mean(), batch.size());
                for (const char* entry : {"scheduler", "averages", "number", "notes"}) change(entry);
                if (!in_mid_pass || session.global_step() != 2) continue;
                session.report({}, state);
                change(what);
              }
              if (in_mid_pass) continue;
              session.report({}, state);
              change(what);
            }
          });
      EXPECT_EQ(code, 0) << name;
      world().barrier();
      const auto log = log_of(storage / name);
      if (what.empty())
        EXPECT_EQ(log.find(text), std::string::npos) << log;
      else
        EXPECT_NE(log.find(text + what + ". Report last"), std::string::npos) << name << ": " << log;
    }
}

TEST(Train, RestoreTakesUpTheSavedConfiguration) {
  const auto storage = test::shared_folder();
  auto options = with_line("saved");
  options.train_loop_config = {{"epochs", 1}};
  options.metadata = {{"who", "us"}};
  Fit fit;
  run({storage, {}, options},
      [&](Session& session, const Config& config) { fit_line(session, config.at("epochs"), fit); });
  EXPECT_TRUE(TorchTrainer::can_restore(storage / "saved"));
  EXPECT_FALSE(TorchTrainer::can_restore(storage));

  std::string program = "job";
  char* argv[] = {program.data()};
  Launch launch(1, argv);
  const int code = launch.run([&] {
    auto trainer = TorchTrainer::restore(launch, storage / "saved",
                                         [&](Session& session, const Config& config) {
                                           EXPECT_EQ(session.metadata().at("who"), "us");
                                           EXPECT_TRUE(session.get_checkpoint());
                                           fit_line(session, config.at("epochs"), fit);
                                         },
                                         {.train_loop_config = {{"epochs", 2}}, .datasets = {{"train", line()}}});
    const auto result = trainer.fit();
    EXPECT_EQ(result.path, storage / "saved") << "by its storage_path, without --storage";
    return result;
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(list_checkpoints(storage / "saved").back().epoch, 1);
}

/// What a trainer was made with.
struct Opened : TorchTrainer {
  explicit Opened(TorchTrainer trainer) : TorchTrainer(std::move(trainer)) {}
  const DataParallelTrainerOptions& options() const { return options_; }
};

TEST(Train, RestoreLosesNoOption) {
  const auto storage = test::shared_folder();
  auto options = with_line("all");
  options.datasets.emplace("more", line());
  options.scaling_config.threads_per_worker = 2;
  options.run_config.failure_config.max_failures = 3;
  options.torch_config = {.backend = "mpi", .timeout = std::chrono::seconds(77)};
  options.dataset_config = {.datasets_to_split = {"train", "more"}};
  Fit fit;
  run({storage, {}, options}, [&](Session& session, const Config&) { fit_line(session, 1, fit); });
  world().barrier();
  const auto file = storage / "all/params.json";
  if (world().rank() == 0) {  // as a run on GPUs would have it
    auto params = Json::parse(detail::read_file(file));
    params["scaling_config"]["use_gpu"] = true;
    detail::write_file(file, params.dump());
  }
  world().barrier();

  std::string program = "job";
  char* argv[] = {program.data()};
  Launch launch(1, argv);
  const int code = launch.run([&] {
    const auto loop = [](Session&, const Config&) {};
    const Opened trainer(TorchTrainer::restore(launch, (storage / "all/").string(), loop));
    EXPECT_EQ(trainer.options().run_config.name, "all") << "with a slash at the end";
    EXPECT_EQ(trainer.options().run_config.storage_path, storage);
    EXPECT_TRUE(trainer.options().scaling_config.use_gpu);
    EXPECT_EQ(trainer.options().scaling_config.threads_per_worker, 2);
    EXPECT_EQ(trainer.options().run_config.failure_config.max_failures, 3);
    EXPECT_EQ(trainer.get_dataset_config().datasets_to_split, (std::vector<std::string>{"train", "more"}));
    auto all = options;
    all.scaling_config.use_gpu = true;
    all.run_config.storage_path = storage;
    EXPECT_EQ(Json(trainer.options()), Json(all));
    const Opened other(TorchTrainer::restore(launch, storage / "all", loop,
                                             {.scaling_config = {.threads_per_worker = 1},
                                              .dataset_config = {.split_all = true},
                                              .run_config = {.failure_config = {.max_failures = -1}}}));
    EXPECT_EQ(other.options().scaling_config.threads_per_worker, 1) << "what is given wins";
    EXPECT_EQ(other.options().run_config.failure_config.max_failures, -1);
    EXPECT_TRUE(other.get_dataset_config().split_all);
  });
  EXPECT_EQ(code, 0);
  const auto saved = Json::parse(detail::read_file(file));
  EXPECT_EQ(saved.at("torch_config").at("backend"), "mpi");
  EXPECT_EQ(saved.at("torch_config").at("timeout_ms"), 77'000);
  world().barrier();
}

TEST(Train, CanRestoreAndRestoreAgree) {
  const auto storage = test::shared_folder();
  Fit fit;
  run({storage, {}, with_line("whole")}, [&](Session& session, const Config&) { fit_line(session, 1, fit); });
  run({storage, {}, with_line("metrics only")}, [](Session& session, const Config&) { session.report({{"a", 1}}); });
  if (world().rank() == 0) {
    for (const char* name : {"no params", "params damaged", "checkpoints damaged"})
      std::filesystem::copy(storage / "whole", storage / name, std::filesystem::copy_options::recursive);
    std::filesystem::remove(storage / "no params/params.json");
    detail::write_file(storage / "params damaged/params.json", "{}");
    for (const auto& info : list_checkpoints(storage / "checkpoints damaged"))
      std::filesystem::remove(info.path / "state.h5");
  }
  world().barrier();
  std::string program = "job";
  char* argv[] = {program.data()};
  Launch launch(1, argv);
  launch.run([&] {
    for (const char* name :
         {"whole", "whole/", "metrics only", "no params", "params damaged", "checkpoints damaged", "nowhere"}) {
      const bool can = TorchTrainer::can_restore(storage / name);
      bool does = true;
      try {
        TorchTrainer::restore(launch, storage / name, [](Session&, const Config&) {});
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::data) << error.what();
        does = false;
      }
      EXPECT_EQ(can, does) << name;
      EXPECT_EQ(can, std::string(name).starts_with("whole")) << name;
    }
  });
  world().barrier();
}

TEST(Train, PrintsASummaryOnceItIsOver) {
  const auto storage = test::shared_folder();
  const auto printed = [&](std::vector<std::string> flags, const std::string& name, bool fails = false) {
    ::testing::internal::CaptureStderr();
    test::Job job{storage, std::move(flags), {}};
    job.options.run_config.name = name;
    test::run(job, [&](Session& session, const Config&) {
      session.report({{"loss", 0.5}});
      session.report({{"loss", 0.25}});
      if (fails) throw std::runtime_error("it has failed");
    });
    return ::testing::internal::GetCapturedStderr();
  };
  const auto count = [](const std::string& text, const std::string& part) {
    int times = 0;
    for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++times;
    return times;
  };
  const int on_rank_0 = world().rank() == 0;
  const auto text = printed({"--progress", "plain"}, "whole");
  EXPECT_EQ(count(text, "finished: 2 reports, " + std::to_string(world().size()) + " rank"), on_rank_0) << text;
  EXPECT_EQ(count(text, "  loss "), 3 * on_rank_0) << "two reports and the summary: " << text;
  EXPECT_EQ(count(printed({"--progress", "plain"}, "whole"), "2 reports"), 0) << "it was finished before";
  EXPECT_EQ(count(printed({}, "quiet"), "2 reports"), 0);
  EXPECT_EQ(count(printed({"--progress", "plain"}, "failed", true), "failed: 2 reports"), on_rank_0);
  EXPECT_EQ(count(printed({"--progress", "plain", "--workers", "99"}, "failed"), "2 reports"), 0) << "it was refused";
}

}  // namespace
}  // namespace muster::train_test
