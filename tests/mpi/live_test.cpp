// Solvers and a trainer on the ranks of one job. The random couplings are in tests/soak/live.cpp.
#include "muster/live.hpp"

#include "comm/mpi_threads.hpp"
#include "data/sources/source.hpp"
#include "muster/mpi.hpp"
#include "muster/muster.hpp"
#include "muster_live.h"
#include "support/errors.hpp"
#include "support/world.hpp"

#include <gtest/gtest.h>
#include <mpi.h>
#include <torch/torch.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

namespace muster::live_test {
namespace {

using test::world;

using test::error_of;

/// A communicator of MPI for the ranks of one side.
class Side {
 public:
  explicit Side(int color) {
    muster_live_world(nullptr);
    MPI_Comm_split(MPI_COMM_WORLD, color, world().rank(), &comm_);
  }
  Side(const Side&) = delete;
  ~Side() { MPI_Comm_free(&comm_); }
  MPI_Comm comm() const { return comm_; }
  int rank() const {
    int rank = 0;
    MPI_Comm_rank(comm_, &rank);
    return rank;
  }
  int size() const {
    int size = 0;
    MPI_Comm_size(comm_, &size);
    return size;
  }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
};

/// Runs a trainer on the ranks below `trainers` and a solver on the others.
void couple(int trainers, const std::function<void(Launch&)>& train, const std::function<void(const Side&)>& solve,
            std::vector<std::string> arguments = {"live_test", "--progress", "none", "--log-level", "error"}) {
  const bool trains = world().rank() < trainers;
  const Side side(trains ? 0 : 1);
  if (trains) {
    std::vector<char*> argv;
    for (auto& argument : arguments) argv.push_back(argument.data());
    Launch launch(static_cast<int>(argv.size()), argv.data(), from_mpi(side.comm()));
    EXPECT_EQ(launch.run([&] { train(launch); }), 0);
  } else {
    solve(side);
  }
  world().barrier();
}

/// A solver's stream whose field "x" has two values on each rank.
muster_live* open(const Side& side, const std::string& name, const muster_live_options& options = {}) {
  muster_live* live = nullptr;
  EXPECT_EQ(muster_live_open(side.comm(), name.c_str(), &options, &live), MUSTER_LIVE_OK) << muster_live_text(live);
  const std::int64_t global = 2 * side.size(), offset = 2 * side.rank(), local = 2;
  muster_live_field(live, "x", MUSTER_LIVE_FLOAT32, 1, &global, &offset, &local);
  return live;
}

int send(muster_live* live, std::int64_t number) {
  const std::array<float, 2> x{static_cast<float>(number), static_cast<float>(number) + 0.5f};
  const std::array<const void*, 1> values{x.data()};
  return muster_live_send(live, number, values.data());
}

/// Takes samples until the solver has ended.
void drain(const Live& live) {
  const auto source = detail::data::source_of(live.dataset());
  while (source->draw(1, 0, [] {})) {
  }
}

/// A trainer that sees no sample, since its solver makes an error.
void expect_no_sample(Launch& launch, const std::string& name) {
  const Live live(launch, name);
  const auto text = error_of([&] { static_cast<void>(live.dataset()); }, ExitCode::retry);
  EXPECT_SAYS(text, "all have ended without a sample");
}

/// What a solver is told that makes `mistake` before its first sample, the same on all ranks.
void expect_refused(const std::string& name, const std::string& part,
                    const std::function<void(muster_live*, const Side&)>& mistake) {
  couple(
      1, [&](Launch& launch) { expect_no_sample(launch, name); },
      [&](const Side& side) {
        muster_live* live = nullptr;
        EXPECT_EQ(muster_live_open(side.comm(), name.c_str(), nullptr, &live), MUSTER_LIVE_OK);
        mistake(live, side);
        EXPECT_EQ(send(live, 0), MUSTER_LIVE_ERROR);
        EXPECT_SAYS(std::string(muster_live_text(live)), part);
        EXPECT_EQ(send(live, 1), MUSTER_LIVE_ERROR);
        muster_live_close(&live, nullptr);
      });
}

void declare(muster_live* live, const char* name, std::int64_t global, std::int64_t offset, std::int64_t local) {
  muster_live_field(live, name, MUSTER_LIVE_FLOAT32, 1, &global, &offset, &local);
}

TEST(Live, BlocksTileTheArray) {
  expect_refused("gap", "Give blocks that tile it", [](muster_live* live, const Side& side) {
    declare(live, "x", 2 * side.size() + 1, 2 * side.rank(), 2);
  });
  expect_refused("overlap", "the blocks of field \"x\" on ranks 0 and 1 overlap",
                 [](muster_live* live, const Side& side) { declare(live, "x", 2 * side.size(), side.rank(), 2); });
  expect_refused("outside", "ends outside of the array",
                 [](muster_live* live, const Side& side) { declare(live, "x", 2, 2 * side.rank(), 2); });
}

TEST(Live, RanksDeclareTheSame) {
  expect_refused("names", "ranks 0 and 1 declare different fields", [](muster_live* live, const Side& side) {
    declare(live, side.rank() == 0 ? "x" : "y", 2 * side.size(), 2 * side.rank(), 2);
  });
  expect_refused("twice", "\"x\" is declared twice", [](muster_live* live, const Side& side) {
    declare(live, "x", 2 * side.size(), 2 * side.rank(), 2);
    if (side.rank() == 1) declare(live, "x", 2 * side.size(), 2 * side.rank(), 2);
  });
  expect_refused("none", "no field is declared", [](muster_live*, const Side&) {});
  expect_refused("halo", "a halo is given for \"u\"", [](muster_live* live, const Side&) {
    const std::int64_t one = 1;
    muster_live_halo(live, "u", &one, &one);
  });
}

TEST(Live, MemoryHoldsABlock) {
  couple(
      1, [](Launch& launch) { expect_no_sample(launch, "small"); },
      [](const Side& side) {
        auto* live = open(side, "small", {.solver = 0, .bytes = 16, .rule = 0, .timeout_s = 0});
        EXPECT_EQ(send(live, 0), MUSTER_LIVE_ERROR);
        EXPECT_SAYS(std::string(muster_live_text(live)), "does not hold one block");
        muster_live_close(&live, nullptr);
      });
}

TEST(Live, TheTrainersMemoryHoldsTheWatermark) {
  couple(
      1,
      [](Launch& launch) {
        const Live live(launch, "few", {.bytes = 200, .watermark = 3});
        const auto text = error_of([&] { static_cast<void>(live.dataset()); }, ExitCode::usage);
        EXPECT_SAYS(text, " samples for the watermark and validation, and LiveOptions::bytes is 200");
      },
      [](const Side& side) {
        auto* live = open(side, "few");
        const auto code = send(live, 0);
        EXPECT_TRUE(code == MUSTER_LIVE_OK || code == MUSTER_LIVE_NO_TRAINER || code == MUSTER_LIVE_ERROR) << code;
        muster_live_close(&live, nullptr);
      });
}

TEST(Live, NumbersRiseAndAreTheSameOnAllRanks) {
  for (const bool rises : {true, false}) {
    const std::string name = rises ? "same" : "rise";
    couple(
        1,
        [&](Launch& launch) {
          const Live live(launch, name);
          EXPECT_EQ(live.dataset().read(std::array<std::int64_t, 1>{0})["sample"][0][1].item<std::int64_t>(), 5);
          drain(live);
        },
        [&](const Side& side) {
          auto* live = open(side, name);
          EXPECT_EQ(send(live, 5), MUSTER_LIVE_OK);
          const auto code = send(live, rises ? 6 + side.rank() : 5);
          EXPECT_EQ(code, MUSTER_LIVE_ERROR);
          EXPECT_SAYS(std::string(muster_live_text(live)),
                      rises ? "its ranks send samples 6 and" : "sample 5 comes after sample 5");
          muster_live_close(&live, nullptr);
        });
  }
}

TEST(Live, DeclarationsComeBeforeTheFirstSample) {
  couple(
      1, [](Launch& launch) { drain(Live(launch, "late")); },
      [](const Side& side) {
        auto* live = open(side, "late");
        EXPECT_EQ(send(live, 0), MUSTER_LIVE_OK);
        if (side.rank() == 0) muster_live_parameter(live, "nu", 1);
        const auto code = send(live, 1);
        EXPECT_EQ(code, MUSTER_LIVE_ERROR);
        EXPECT_SAYS(std::string(muster_live_text(live)), "\"nu\" is declared after the first sample");
        muster_live_close(&live, nullptr);
      });
}

TEST(Live, NamesAndNumbersAreTheirOwn) {
  couple(
      1,
      [](Launch& launch) {
        const Live live(launch, "own");
        EXPECT_SAYS(error_of([&] { Live(launch, "own"); }, ExitCode::usage),
                    "the job has another muster::Live of this name");
        EXPECT_SAYS(error_of([&] { Live(launch, "a b"); }, ExitCode::usage), "it is no name of a stream");
        const auto refused = [&](const LiveOptions& options) {
          return error_of([&] { Live(launch, "b", options); }, ExitCode::usage);
        };
        EXPECT_SAYS(refused({.rule = LiveRule::fifo, .max_uses = 2}), "the rule uses each sample once");
        EXPECT_SAYS(refused({.rule = LiveRule::uniform, .min_fresh = 0.5}), "min_fresh is set, and the rule uniform");
        EXPECT_SAYS(refused({.min_fresh = 2}), "min_fresh is not a share");
        EXPECT_SAYS(refused({.solvers = 0}), "samples_per_epoch or solvers is less than 1");
        EXPECT_SAYS(refused({.watermark = -1}), "an option is negative");
        EXPECT_SAYS(error_of([&] { static_cast<void>(live.validation()); }, ExitCode::usage), "no sample is held out");
        EXPECT_SAYS(error_of([&] { static_cast<void>(live.dataset().subset({0})); }, ExitCode::usage),
                    "it draws its samples itself");
        drain(live);
      },
      [](const Side& side) {
        auto* live = open(side, "own");
        EXPECT_EQ(send(live, 0), MUSTER_LIVE_OK);
        muster_live* other = nullptr;
        EXPECT_EQ(muster_live_open(side.comm(), "own", nullptr, &other), MUSTER_LIVE_ERROR);
        EXPECT_SAYS(std::string(muster_live_text(other)), "solver 0 has opened this stream already");
        muster_live_close(&other, nullptr);
        const muster_live_options second{.solver = 1, .bytes = 0, .rule = 0, .timeout_s = 0};
        EXPECT_EQ(muster_live_open(side.comm(), "own", &second, &other), MUSTER_LIVE_ERROR);
        EXPECT_SAYS(std::string(muster_live_text(other)), "the trainer knows solvers 0 to 0");
        muster_live_close(&other, nullptr);
        EXPECT_THROW(LiveSender(side.comm(), "own", second), std::runtime_error);
        muster_live_close(&live, nullptr);
      });
}

// A solver and a trainer with two streams, which they begin in opposite orders.
TEST(Live, TwoStreamsOfASolver) {
  couple(
      1,
      [](Launch& launch) {
        const Live first(launch, "first"), second(launch, "second");
        for (const auto* live : {&first, &second}) {
          drain(*live);
          const auto ledger = live->ledger();
          EXPECT_EQ(ledger.sent, 3);
          EXPECT_EQ(ledger.used, 3);
        }
      },
      [](const Side& side) {
        auto* second = open(side, "second");
        auto* first = open(side, "first");
        for (std::int64_t number = 0; number < 3; ++number)
          for (auto* live : {first, second}) EXPECT_EQ(send(live, number), MUSTER_LIVE_OK) << muster_live_text(live);
        muster_live_close(&first, nullptr);  // first of the two, since the trainer waits for its end
        muster_live_close(&second, nullptr);
      });
}

TEST(Live, WeightsComeBack) {
  const auto weights = torch::arange(1000, torch::kFloat);
  couple(
      1,
      [&](Launch& launch) {
        Live live(launch, "weights", {.rule = LiveRule::fifo});
        const auto source = detail::data::source_of(live.dataset());
        EXPECT_EQ(live.send_weights("old"), 1);
        while (auto drawn = source->draw(1, 0, [] {}))
          if (drawn->batch["sample"][0][1].item<std::int64_t>() == 1) {
            EXPECT_EQ(live.send_weights(safetensors({.tensors = {{"w", weights}}})), 2);
          }
      },
      [&](const Side& side) {
        LiveSender sender(side.comm(), "weights");
        sender.field("x", MUSTER_LIVE_FLOAT32, {2 * side.size()}, {2 * side.rank()}, {2});
        const std::array<float, 2> x{};
        std::vector<char> bytes;
        EXPECT_EQ(sender.send(0, {x.data()}), MUSTER_LIVE_OK);
        while (sender.weights(bytes) == 0) {
        }
        EXPECT_EQ(std::string(bytes.begin(), bytes.end()), "old");
        EXPECT_EQ(sender.send(1, {x.data()}), MUSTER_LIVE_OK);
        while (sender.weights(bytes, 1) == 1) {
        }
        const auto expected = safetensors({.tensors = {{"w", weights}}});
        EXPECT_TRUE(std::ranges::equal(bytes, expected));
        EXPECT_EQ(sender.weights(bytes, 2), 2);
      });
}

TEST(Live, LocalCallsAfterAnErrorReturnIt) {
  couple(
      1, [](Launch& launch) { expect_no_sample(launch, "after"); },
      [](const Side& side) {
        LiveSender sender(side.comm(), "after");
        EXPECT_THROW(sender.field("x", MUSTER_LIVE_FLOAT32, {0}, {0}, {0}), std::runtime_error);
        EXPECT_THROW(sender.parameter("nu", 1), std::runtime_error);
        EXPECT_THROW(sender.progress(), std::runtime_error);
        EXPECT_THROW(sender.send(0, {nullptr}), std::runtime_error);
      });
}

TEST(Live, OtherNodesNeedMpiOfSeveralThreads) {
  if (detail::comm::threads_may_call_mpi()) GTEST_SKIP();
  ::setenv("MUSTER_TEST_LIVE", "mpi", 1);
  couple(
      1,
      [](Launch& launch) {
        const auto text = error_of([&] { Live(launch, "threads"); }, ExitCode::usage);
        EXPECT_SAYS(text, "a solver may be on another node, and MPI was not initialised for several threads");
      },
      [](const Side&) {});
  ::unsetenv("MUSTER_TEST_LIVE");
}

TEST(Live, TheTrainerWaitsForASolverAtMostSoLong) {
  couple(
      1,
      [](Launch& launch) {
        const Live live(launch, "alone", {.timeout = std::chrono::seconds(1)});
        const auto text = error_of([&] { static_cast<void>(live.dataset()); }, ExitCode::retry);
        EXPECT_SAYS(text, "none has sent a sample within 1 s");
      },
      [](const Side&) {});
}

TEST(Live, OneSideAlone) {
  muster_live_world(nullptr);
  muster_live* live = nullptr;
  EXPECT_EQ(muster_live_open(MPI_COMM_WORLD, "alone", nullptr, &live), MUSTER_LIVE_NO_TRAINER);
  EXPECT_SAYS(std::string(muster_live_text(live)), "no rank of the job is left for a trainer");
  EXPECT_EQ(send(live, 0), MUSTER_LIVE_NO_TRAINER);
  muster_live_close(&live, nullptr);
  std::string program = "live_test";
  std::array<char*, 2> arguments{program.data(), nullptr};
  Launch launch(1, arguments.data(), world());
  const auto code = launch.run([&] {
    const auto text = error_of([&] { Live(launch, "alone"); }, ExitCode::usage);
    EXPECT_SAYS(text, "no rank of the job is left for a solver");
  });
  EXPECT_EQ(code, 0);
}

TEST(Live, OptionsAreTheSameOnAllTrainers) {
  couple(
      2,
      [](Launch& launch) {
        const auto text = error_of([&] { Live(launch, "differ", {.watermark = 1 + launch.rank()}); }, ExitCode::usage);
        EXPECT_SAYS(text, "watermark");
      },
      [](const Side&) {});
}

TEST(Live, TheTrainerMayEndFirst) {
  couple(
      1,
      [](Launch& launch) {
        const Live live(launch, "short");
        static_cast<void>(live.dataset());
      },
      [](const Side& side) {
        auto* live = open(side, "short", {.solver = 0, .bytes = 0, .rule = MUSTER_LIVE_WAIT, .timeout_s = 60});
        int code = MUSTER_LIVE_OK;
        for (std::int64_t number = 0; code == MUSTER_LIVE_OK; ++number) code = send(live, number);
        EXPECT_EQ(code, MUSTER_LIVE_NO_TRAINER);
        EXPECT_SAYS(std::string(muster_live_text(live)), "the trainer has ended");
        muster_live_close(&live, nullptr);
      });
}

/// Trains with `live` until epoch `last`, and returns the ledger.
LiveLedger train(Launch& launch, const std::filesystem::path& storage, std::int64_t last, bool resumes) {
  Live live(
      launch, "train",
      {.bytes = 1 << 14, .watermark = 8, .samples_per_epoch = 32, .validation_every = 5, .validation_samples = 4});
  LiveLedger ledger;
  const auto result =
      TorchTrainer(launch,
                   [&](Session& session) {
                     auto net = session.prepare_model(torch::nn::Linear(4, 1));
                     torch::optim::SGD optimizer(net->parameters(), 0.01);
                     auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"live", live}});
                     EXPECT_EQ(state.restore(), resumes);
                     if (resumes) {
                       const auto now = live.ledger();
                       EXPECT_EQ(now.draws, 64) << "those of the checkpoint";
                       EXPECT_GE(now.sent, now.waiting + now.used);
                     }
                     for (const auto epoch : session.epochs(4)) {
                       Mean loss;
                       for (auto& batch : session.get_dataset_shard("train").iter_torch_batches({.batch_size = 4})) {
                         EXPECT_EQ(batch["x"].sizes(), at::IntArrayRef({batch["x"].size(0), 4}));
                         optimizer.zero_grad();
                         const auto l = net->forward(batch["x"]).square().mean();
                         l.backward();
                         optimizer.step();
                         loss.add(l, batch.size());
                       }
                       session.report({{"loss", loss}}, state);
                       ledger = live.ledger();
                       if (epoch == last) throw std::runtime_error("stopped here");
                     }
                   },
                   {.dataset_config = {.split_all = true},
                    .run_config = {.name = "coupled", .storage_path = storage},
                    .datasets = {{"train", live.dataset()}, {"validation", live.validation()}},
                    .preprocessor = standard_scaler({"x"})})
          .fit();
  EXPECT_EQ(result.error.has_value(), last < 3) << result.error->what();
  const auto row = result.metrics_history.back().at("live").at("train");
  EXPECT_LE(row.at("sent").get<std::int64_t>(), ledger.sent);
  EXPECT_EQ(row.at("used").get<std::int64_t>(), ledger.used);
  EXPECT_EQ(row.at("room").get<std::int64_t>(), ledger.room);
  EXPECT_GE(row.at("uses_per_sample").get<double>(), 1);
  live.stop_solvers();
  return ledger;
}

// A run goes on at another number of trainers and solvers, with the samples that it had.
TEST(Live, ARunGoesOnAtOtherNumbersOfRanks) {
  if (world().size() < 4) GTEST_SKIP();
  const auto storage = test::shared_folder();
  for (const int start : {0, 1}) {
    couple(
        start == 0 ? 2 : 1,
        [&](Launch& launch) {
          const auto ledger = train(launch, storage, start == 0 ? 1 : 4, start == 1);
          EXPECT_EQ(ledger.sent, ledger.on_its_way + ledger.waiting + ledger.used + ledger.validation +
                                     ledger.dropped_by_solver + ledger.dropped_by_trainer + ledger.lost);
          EXPECT_EQ(ledger.draws, start == 0 ? 64 : 128);
          EXPECT_GE(ledger.on_its_way, 0);
        },
        [&](const Side& side) {
          muster_live* live = nullptr;
          EXPECT_EQ(muster_live_open(side.comm(), "train", nullptr, &live), MUSTER_LIVE_OK) << muster_live_text(live);
          const std::int64_t local = side.rank() == 0 ? 4 - (side.size() - 1) : 1;
          declare(live, "x", 4, side.rank() == 0 ? 0 : 4 - (side.size() - 1) + side.rank() - 1, local);
          std::int64_t number = -1;
          EXPECT_EQ(muster_live_next(live, &number), MUSTER_LIVE_OK);
          EXPECT_EQ(number > 0, start == 1) << number;
          int code = MUSTER_LIVE_OK;
          for (; code == MUSTER_LIVE_OK; ++number) {
            const std::vector<float> x(4, static_cast<float>(number));
            const std::array<const void*, 1> values{x.data()};
            code = muster_live_send(live, number, values.data());
          }
          EXPECT_TRUE(code == MUSTER_LIVE_STOP || code == MUSTER_LIVE_NO_TRAINER) << muster_live_text(live);
          muster_live_close(&live, nullptr);
        });
  }
}

}  // namespace
}  // namespace muster::live_test
