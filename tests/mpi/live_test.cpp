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
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
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

// Weights of any version come whole, while newer ones replace them.
TEST(Live, WeightsAreReplacedWhileTheyAreSent) {
  constexpr std::int64_t last = 30;
  const auto weights_of = [](std::int64_t version) {
    return std::string(static_cast<std::size_t>((1 << 20) + 64 * version), static_cast<char>('A' + version));
  };
  couple(
      1,
      [&](Launch& launch) {
        Live live(launch, "replaced", {.rule = LiveRule::fifo});
        const auto dataset = live.dataset();
        for (std::int64_t version = 1; version <= last; ++version) {
          EXPECT_EQ(live.send_weights(weights_of(version)), version);
        }
        drain(live);
      },
      [&](const Side& side) {
        LiveSender sender(side.comm(), "replaced");
        sender.field("x", MUSTER_LIVE_FLOAT32, {2 * side.size()}, {2 * side.rank()}, {2});
        const std::array<float, 2> x{};
        std::vector<char> bytes;
        EXPECT_EQ(sender.send(0, {x.data()}), MUSTER_LIVE_OK);
        for (std::int64_t version = 0, before = 0; version < last; before = version) {
          version = sender.weights(bytes, before);
          if (version != before) {
            EXPECT_TRUE(std::ranges::equal(bytes, weights_of(version))) << version;
          }
        }
      });
}

TEST(Live, WeightsEndWithTheTrainer) {
  couple(
      1,
      [&](Launch& launch) {
        Live live(launch, "ending");
        static_cast<void>(live.dataset());
        live.send_weights("first");
      },
      [&](const Side& side) {
        auto* live = open(side, "ending", {.solver = 0, .bytes = 0, .rule = MUSTER_LIVE_WAIT, .timeout_s = 60});
        EXPECT_NE(send(live, 0), MUSTER_LIVE_ERROR);  // the trainer may have ended before
        std::array<char, 8> buffer{};
        std::int64_t version = 0, bytes = 0;
        int code = MUSTER_LIVE_OK;
        while (code == MUSTER_LIVE_OK) {
          bytes = buffer.size();
          code = muster_live_weights(live, &version, buffer.data(), &bytes);
        }
        EXPECT_EQ(code, MUSTER_LIVE_NO_TRAINER);
        EXPECT_EQ(version, 0);
        EXPECT_SAYS(std::string(muster_live_text(live)), "the trainer has ended");
        muster_live_close(&live, nullptr);
      });
}

/// True if streams of this node go over sockets, which tell of a death.
bool has_sockets() { return std::getenv("MUSTER_TEST_LIVE") == nullptr; }

/// Closes this process's sockets of streams, as the kernel does when it dies.
void die() {
  for (int file = 3; file < 1024; ++file) {
    sockaddr_un peer{};
    socklen_t bytes = sizeof peer;
    if (::getpeername(file, reinterpret_cast<sockaddr*>(&peer), &bytes) == 0 && peer.sun_family == AF_UNIX &&
        std::string_view(peer.sun_path + 1).starts_with("muster-live/"))
      ::shutdown(file, SHUT_RDWR);
  }
}

/// How many attempts a trainer makes that may make three, when solvers die, and the error.
std::pair<int, std::string> attempts(Launch& launch, Live& live) {
  int attempts = 0;
  const auto storage = std::filesystem::temp_directory_path() / ("live_attempts." + std::to_string(::getpid()));
  const auto result =
      TorchTrainer(launch,
                   [&](Session& session) {
                     ++attempts;
                     for ([[maybe_unused]] const auto epoch : session.epochs(1'000'000'000)) {
                       for (auto& batch : session.get_dataset_shard("train").iter_torch_batches({.batch_size = 4}))
                         EXPECT_GT(batch.size(), 0);
                       if (live.ended()) break;
                     }
                   },
                   {.run_config = {.storage_path = storage, .failure_config = {.max_failures = 2}},
                    .datasets = {{"train", live.dataset()}}})
          .fit();
  std::filesystem::remove_all(storage);
  return {attempts, result.error ? result.error->what() : ""};
}

// Nobody takes a dead solver's place in this job. So no trainer tries again, and none takes the death for an end.
TEST(Live, DeadSolversEndTheJob) {
  if (!has_sockets()) GTEST_SKIP();
  for (const auto on_death : {LiveFault::end, LiveFault::go_on}) {
    const std::string name = on_death == LiveFault::end ? "one" : "all";
    couple(
        1,
        [&](Launch& launch) {
          Live live(launch, name, {.on_solver_death = on_death});
          const auto [made, error] = attempts(launch, live);
          EXPECT_EQ(made, 1);
          EXPECT_SAYS(error, on_death == LiveFault::end ? "solver 0 has ended without muster_live_close()"
                                                        : "all solvers have ended without muster_live_close()");
        },
        [&](const Side& side) {
          auto* live = open(side, name);
          EXPECT_EQ(send(live, 0), MUSTER_LIVE_OK);
          die();
          muster_live_close(&live, nullptr);
        });
  }
}

TEST(Live, DeadSolversLeaveTheEndToThoseThatClose) {
  if (!has_sockets()) GTEST_SKIP();
  couple(
      1,
      [](Launch& launch) {
        Live live(launch, "left", {.solvers = 2});
        const auto [made, error] = attempts(launch, live);
        EXPECT_EQ(made, 1);
        EXPECT_EQ(error, "");
      },
      [](const Side& side) {
        auto* first = open(side, "left");
        EXPECT_EQ(send(first, 0), MUSTER_LIVE_OK);
        die();
        muster_live_close(&first, nullptr);
        auto* second = open(side, "left", {.solver = 1, .bytes = 0, .rule = 0, .timeout_s = 0});
        EXPECT_EQ(send(second, 0), MUSTER_LIVE_OK);
        muster_live_close(&second, nullptr);
      });
}

// The first solver's fields are those of the stream on all ranks of the trainer.
TEST(Live, OneOfTwoDifferentSolversIsRefused) {
  if (world().size() < 4) GTEST_SKIP();
  for (int round = 0; round < 5; ++round) {
    const auto name = "different" + std::to_string(round);
    couple(
        2,
        [&](Launch& launch) {
          const Live live(launch, name, {.rule = LiveRule::fifo, .solvers = 2});
          drain(live);
          EXPECT_EQ(live.ledger().used, 10);
        },
        [&](const Side& side) {
          MPI_Comm alone = MPI_COMM_NULL;
          MPI_Comm_split(side.comm(), side.rank(), 0, &alone);
          muster_live* live = nullptr;
          const muster_live_options options{.solver = side.rank(), .bytes = 0, .rule = 0, .timeout_s = 0};
          EXPECT_EQ(muster_live_open(alone, name.c_str(), &options, &live), MUSTER_LIVE_OK);
          declare(live, side.rank() == 0 ? "x" : "y", 2, 0, 2);
          MPI_Barrier(side.comm());
          std::int64_t sent = 0;
          while (sent < 10 && send(live, sent) == MUSTER_LIVE_OK) ++sent;
          std::array<std::int64_t, 2> both{sent == 10, sent == 0};
          MPI_Allreduce(MPI_IN_PLACE, both.data(), 2, MPI_INT64_T, MPI_SUM, side.comm());
          EXPECT_EQ(both, (std::array<std::int64_t, 2>{1, 1}));
          if (sent == 0) {
            EXPECT_SAYS(std::string(muster_live_text(live)), "are not those of the stream's first solver");
          }
          muster_live_close(&live, nullptr);
          MPI_Comm_free(&alone);
        });
  }
}

// The trainer still has samples of the first time to take.
TEST(Live, ASolverOpensItsStreamAgain) {
  if (!has_sockets()) GTEST_SKIP();  // between nodes it closes when they have left
  couple(
      1,
      [](Launch& launch) {
        const Live live(launch, "again", {.rule = LiveRule::fifo, .bytes = 1000});
        const auto dataset = live.dataset();
        launch.communicator().barrier();
        world().barrier();
        drain(live);
        EXPECT_EQ(live.ledger().used, 80);
      },
      [](const Side& side) {
        for (const std::int64_t first : {0, 40}) {
          auto* live = open(side, "again");
          for (auto number = first; number < first + 40; ++number) EXPECT_EQ(send(live, number), MUSTER_LIVE_OK);
          if (first > 0) world().barrier();
          muster_live_close(&live, nullptr);
        }
      });
}

/// Leaves this process `count` file descriptors while it lives.
class FewDescriptors {
 public:
  explicit FewDescriptors(int count) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    auto now = before_;
    const int next = ::dup(0);
    ::close(next);
    now.rlim_cur = static_cast<rlim_t>(next + count);
    ::setrlimit(RLIMIT_NOFILE, &now);
  }
  FewDescriptors(const FewDescriptors&) = delete;
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

TEST(Live, NoDescriptorsAreLeft) {
  if (!has_sockets()) GTEST_SKIP();
  couple(
      1,
      [](Launch& launch) {
        Live live(launch, "few_files");
        {
          const FewDescriptors none(0);
          world().barrier();
          world().barrier();
        }
        world().barrier();
        live.send_weights("weights");
        drain(live);
        EXPECT_EQ(live.ledger().used, 1);
      },
      [](const Side& side) {
        muster_live* live = nullptr;
        const muster_live_options options{.solver = 0, .bytes = 0, .rule = 0, .timeout_s = 1};
        world().barrier();
        EXPECT_EQ(muster_live_open(side.comm(), "few_files", &options, &live), MUSTER_LIVE_NO_TRAINER);
        muster_live_close(&live, nullptr);
        world().barrier();
        world().barrier();
        {
          const FewDescriptors none(0);
          EXPECT_EQ(muster_live_open(side.comm(), "few_files", nullptr, &live), MUSTER_LIVE_ERROR);
          EXPECT_SAYS(std::string(muster_live_text(live)), "Raise the limit on open files");
          muster_live_close(&live, nullptr);
        }
        live = open(side, "few_files");
        EXPECT_EQ(send(live, 0), MUSTER_LIVE_OK);
        std::int64_t version = 0, bytes = 0;
        const FewDescriptors none(0);
        int code = MUSTER_LIVE_OK;
        while (code == MUSTER_LIVE_OK && version == 0) code = muster_live_weights(live, &version, nullptr, &bytes);
        EXPECT_EQ(code, MUSTER_LIVE_ERROR);
        EXPECT_SAYS(std::string(muster_live_text(live)), "this process is out of file descriptors");
        muster_live_close(&live, nullptr);
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

/// A solver's stream to a trainer that it finds by a file, with the same field as open().
muster_live* connect(const Side& side, const std::string& name, const std::string& file, double timeout_s = 0) {
  muster_live* live = nullptr;
  const muster_live_options options{.solver = 0, .bytes = 0, .rule = 0, .timeout_s = timeout_s};
  EXPECT_EQ(muster_live_connect(side.comm(), file.c_str(), name.c_str(), &options, &live), MUSTER_LIVE_OK)
      << muster_live_text(live);
  const std::int64_t global = 2 * side.size(), offset = 2 * side.rank(), local = 2;
  muster_live_field(live, "x", MUSTER_LIVE_FLOAT32, 1, &global, &offset, &local);
  return live;
}

TEST(Live, SolversOfOtherJobsFindTheTrainerByItsFile) {
  const auto file = (test::shared_folder() / "heat.live").string();
  couple(
      2,
      [&](Launch& launch) {
        Live live(launch, "found", {.rule = LiveRule::fifo, .connect_file = file});
        if (launch.rank() == 0) {
          EXPECT_EQ(std::filesystem::status(file).permissions(),
                    std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
        }
        static_cast<void>(live.dataset());
        live.send_weights("weights");
        drain(live);
        EXPECT_EQ(live.ledger().used, 10);
      },
      [&](const Side& side) {
        auto* live = connect(side, "found", file);
        for (std::int64_t number = 0; number < 10; ++number) EXPECT_EQ(send(live, number), MUSTER_LIVE_OK);
        std::array<char, 8> buffer{};
        std::int64_t version = 0, bytes = 0;
        for (int code = MUSTER_LIVE_OK; code == MUSTER_LIVE_OK && version == 0;) {
          bytes = buffer.size();
          code = muster_live_weights(live, &version, buffer.data(), &bytes);
          EXPECT_EQ(code, MUSTER_LIVE_OK) << muster_live_text(live);
        }
        EXPECT_EQ(std::string(buffer.data()), "weights");
        muster_live_close(&live, nullptr);
      });
  EXPECT_FALSE(std::filesystem::exists(file));
}

TEST(Live, ATrainerOfAnotherJobComesBack) {
  const auto file = (test::shared_folder() / "back.live").string();
  couple(
      1,
      [&](Launch& launch) {
        for (const bool is_first : {true, false}) {
          const Live live(launch, "back", {.rule = LiveRule::fifo, .connect_file = file});
          static_cast<void>(live.dataset());
          if (is_first) continue;
          drain(live);
          EXPECT_EQ(live.ledger().used, 3);
        }
      },
      [&](const Side& side) {
        auto* live = connect(side, "back", file);
        std::int64_t number = 0;
        while (send(live, number) == MUSTER_LIVE_OK) ++number;
        EXPECT_SAYS(std::string(muster_live_text(live)), "whose connect_file is");
        while (send(live, 0) == MUSTER_LIVE_NO_TRAINER) {
        }
        EXPECT_EQ(std::string(muster_live_text(live)), "");
        EXPECT_EQ(send(live, 1), MUSTER_LIVE_OK);
        EXPECT_EQ(send(live, 2), MUSTER_LIVE_OK);
        muster_live_counts counts{};
        muster_live_close(&live, &counts);
        EXPECT_EQ(counts.sent, number + 3);
      });
}

TEST(Live, ASolverOfAnotherJobComesBack) {
  const auto file = (test::shared_folder() / "again.live").string();
  couple(
      1,
      [&](Launch& launch) {
        const Live live(launch, "returned", {.rule = LiveRule::fifo, .connect_file = file});
        drain(live);
        EXPECT_EQ(live.ledger().used, 10);
      },
      [&](const Side& side) {
        for (const std::int64_t first : {0, 5}) {
          auto* live = connect(side, "returned", file);
          std::int64_t next = -1;
          EXPECT_EQ(muster_live_next(live, &next), MUSTER_LIVE_OK) << muster_live_text(live);
          EXPECT_LE(next, first);
          for (auto number = first; number < first + 5; ++number) EXPECT_EQ(send(live, number), MUSTER_LIVE_OK);
          MPI_Barrier(side.comm());  // all have published the last sample
          if (first == 0) die();
          muster_live_close(&live, nullptr);
        }
      });
}

TEST(Live, WhatIsWrongWithAConnectFile) {
  const auto folder = test::shared_folder();
  const auto file = (folder / "other.live").string();
  couple(
      1,
      [&](Launch& launch) {
        EXPECT_SAYS(error_of([&] { Live(launch, "nowhere", {.connect_file = (folder / "no" / "file").string()}); },
                             ExitCode::usage),
                    "cannot be written: No such file or directory");
        {
          std::optional<Live> before(std::in_place, launch, "before", LiveOptions{.connect_file = file});
          const Live live(launch, "other", {.connect_file = file});
          before.reset();  // leaves the file of the trainer that has come after it
          drain(live);
        }
        EXPECT_FALSE(std::filesystem::exists(file));
      },
      [&](const Side& side) {
        muster_live* live = nullptr;
        const muster_live_options options{.solver = 0, .bytes = 0, .rule = 0, .timeout_s = 1};
        EXPECT_EQ(muster_live_connect(side.comm(), (folder / "none").c_str(), "other", &options, &live),
                  MUSTER_LIVE_NO_TRAINER);
        EXPECT_SAYS(std::string(muster_live_text(live)), "no trainer has come in time");
        muster_live_close(&live, nullptr);
        EXPECT_EQ(muster_live_connect(side.comm(), file.c_str(), "this", nullptr, &live), MUSTER_LIVE_ERROR);
        EXPECT_SAYS(std::string(muster_live_text(live)), "its file is that of the stream \"other\"");
        muster_live_close(&live, nullptr);
        live = connect(side, "other", file);
        EXPECT_EQ(send(live, 0), MUSTER_LIVE_OK);
        muster_live_close(&live, nullptr);
      });
}

/// Trains with `live` until epoch `last`, and returns the ledger.
LiveLedger train(Launch& launch, const std::filesystem::path& storage, std::int64_t last, bool resumes,
                 std::int64_t bytes) {
  Live live(launch, "train",
            {.bytes = bytes, .watermark = 8, .samples_per_epoch = 32, .validation_every = 5, .validation_samples = 4});
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

void go_on_at(const std::array<int, 2>& trainers, std::int64_t bytes) {
  const auto storage = test::shared_folder();
  for (const int start : {0, 1}) {
    couple(
        trainers[static_cast<std::size_t>(start)],
        [&](Launch& launch) {
          const auto ledger = train(launch, storage, start == 0 ? 1 : 4, start == 1, bytes);
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

// A run goes on at another number of trainers and solvers, with the samples that it had.
TEST(Live, ARunGoesOnAtOtherNumbersOfRanks) {
  if (world().size() < 4) GTEST_SKIP();
  go_on_at({2, 1}, 1 << 14);
}

// The reservoir is full when it is saved; one rank of the trainer is on the solver's node, the other is not.
TEST(Live, AFullReservoirIsSavedOnRanksOfDifferentNodes) {
  if (!detail::comm::threads_may_call_mpi()) GTEST_SKIP() << "MPI was not initialised for several threads";
  const auto* const before = std::getenv("MUSTER_TEST_LIVE");
  const std::string kept = before ? before : "";
  ::setenv("MUSTER_TEST_LIVE", "mixed", 1);
  go_on_at({2, 2}, 1 << 10);
  before ? ::setenv("MUSTER_TEST_LIVE", kept.c_str(), 1) : ::unsetenv("MUSTER_TEST_LIVE");
}

}  // namespace
}  // namespace muster::live_test
