#include "comm/agreement.hpp"
#include "comm/channel.hpp"
#include "comm/collectives.hpp"
#include "comm/on_ranks.hpp"
#include "comm/timeout.hpp"
#include "comm/wait.hpp"
#include "node/shared_segment.hpp"
#include "support/world.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <iterator>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace muster::detail::comm::comm_test {
namespace {

using namespace std::chrono_literals;
using test::world;

/// Nothing is shared if each rank has its own node.
bool shares() { return world().topology().num_nodes < world().size(); }

TEST(Communicator, GathersInTheOrderOfRanks) {
  const auto values = world().all_gather(std::string(static_cast<std::size_t>(world().rank()), 'x'));
  ASSERT_EQ(values.size(), static_cast<std::size_t>(world().size()));
  for (int r = 0; r < world().size(); ++r)
    EXPECT_EQ(values[static_cast<std::size_t>(r)].size(), static_cast<std::size_t>(r));
  EXPECT_EQ(world().broadcast(std::to_string(world().rank()), world().size() - 1), std::to_string(world().size() - 1));
}

TEST(Communicator, SplitsByColourAndKey) {
  const auto part = world().split(world().rank() % 2, -world().rank());
  try {
    world().split(-1);
    ADD_FAILURE() << "a negative colour is taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("splitting a communicator: the colour -1 is negative"), std::string::npos);
  }
  const int n = world().size(), r = world().rank();
  EXPECT_EQ(part.size(), r % 2 == 0 ? (n + 1) / 2 : n / 2);
  EXPECT_EQ(part.rank(), part.size() - 1 - r / 2) << "the key turns the order round";
  EXPECT_EQ(part.all_reduce(std::int64_t{1}), part.size());
  if (world().topology().num_nodes == 1) {
    EXPECT_EQ(part.topology().local_size, part.size());
  }
}

TEST(Communicator, RefusesARootThatIsNotThere) {
  for (const int root : {-1, world().size()}) try {
      world().broadcast("value", root);
      ADD_FAILURE() << "there is no rank " << root;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_NE(std::string(error.what()).find("no rank " + std::to_string(root) + " among "), std::string::npos);
    }
  EXPECT_EQ(world().broadcast("value"), "value");
}

TEST(Communicator, SharedMemoryBeginsWithAPage) {
  for (const auto& communicator : {world(), world().split(world().rank())})
    for (const std::size_t bytes : {1, 100, 70'000}) {
      const auto memory = communicator.shared_memory(bytes), another = communicator.shared_memory(bytes);
      for (const auto& one : {memory, another})
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(one.data()) % page_size(), 0U) << bytes << " bytes";
      EXPECT_EQ(std::ranges::count(memory.as<char>(), 0), static_cast<std::ptrdiff_t>(bytes));
    }
}

TEST(Communicator, SharedMemoryThatNoRankHasAnyMoreIsGivenBack) {
  const auto channel = world().duplicate();
  const auto open_files = [] { return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}); };
  std::vector<double> own(1000, 1.0);
  std::optional<SharedMemory> kept;  // by one rank
  std::ptrdiff_t before = 0;
  for (int round = 0; round < 40; ++round) {
    if (round == 4) before = open_files();
    const auto memory = channel.shared_memory(own.size() * sizeof(double));
    if (round == 2 && channel.rank() == 0) kept = memory;
    std::ranges::fill(memory.as<double>(), 1.0);
    channel.all_reduce(memory.as<double>());
    EXPECT_EQ(std::ranges::count(memory.as<double>(), channel.size()), 1000);
  }
  EXPECT_LE(open_files(), before + 1);
  if (kept) std::ranges::fill(kept->as<double>(), 1.0);
  channel.all_reduce(kept ? kept->as<double>() : std::span(own));
  EXPECT_EQ(std::ranges::count(kept ? kept->as<double>() : std::span(own), channel.size()), 1000);
}

TEST(Communicator, SharedMemoryIsGivenBackBeforeMoreIsTaken) {
  if (!shares()) GTEST_SKIP() << "needs another rank on its node";
  const auto channel = world().duplicate();
  for (int round = 0; round < 2; ++round) channel.shared_memory(1000);
  int highest = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    highest = std::max(highest, std::stoi(entry.path().filename().string()));
  std::vector<int> taken;  // all that are free below the limit
  for (int file = 0; file >= 0 && file <= highest;) taken.push_back(file = ::open("/dev/null", O_RDONLY | O_CLOEXEC));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit full{.rlim_cur = static_cast<rlim_t>(taken.back()) + 1, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &full), 0);
  const auto memory = channel.shared_memory(1000);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  for (const int file : taken) ::close(file);
  EXPECT_TRUE(Channel::of(channel)->hierarchy()->communicator->is_registered(memory.data(), memory.size()));
}

TEST(Communicator, AChildOfForkWritesToMemoryOfItsOwn) {
  const auto memory = world().shared_memory(100'000 * sizeof(double));
  const auto values = memory.as<double>();
  std::ranges::fill(values, 1.0);
  const pid_t child = ::fork();
  if (child == 0) {
    std::ranges::fill(values, 5.0);
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(std::ranges::count(values, 1.0), 100'000);
  world().all_reduce(values);
  EXPECT_EQ(std::ranges::count(values, static_cast<double>(world().size())), 100'000);
}

TEST(Communicator, DuplicatesDoNotMixMessages) {
  auto a = world().duplicate(), b = world().duplicate();
  Collectives on_a(a), on_b(b);
  std::vector<double> x(1000, 1.0), y(1000, 2.0);
  auto first = on_a.all_reduce(x.data(), x.size(), Dtype::f64, ReduceOp::sum);
  auto second = on_b.all_reduce(y.data(), y.size(), Dtype::f64, ReduceOp::sum);
  second.wait();
  first.wait();
  EXPECT_EQ(x[999], world().size());
  EXPECT_EQ(y[0], 2.0 * world().size());
}

TEST(Collectives, ChunksGiveTheSameAsOneCall) {
  for (const std::size_t chunk : {std::size_t{1}, std::size_t{7}, most_per_call}) {
    Collectives collectives(world(), chunk);
    std::vector<std::int64_t> values(20);
    std::iota(values.begin(), values.end(), world().rank());
    collectives.all_reduce(values.data(), values.size(), Dtype::i64, ReduceOp::max).wait();
    EXPECT_EQ(values[19], 19 + world().size() - 1) << chunk;

    std::vector<std::int64_t> gathered(20 * static_cast<std::size_t>(world().size()));
    std::vector<Message> sends, receives;
    for (int r = 0; r < world().size(); ++r) {
      sends.push_back({values.data(), values.size(), r});
      receives.push_back({gathered.data() + 20 * r, 20, r});
    }
    collectives.all_to_all(sends, receives, Dtype::i64).wait();
    EXPECT_EQ(gathered.back(), values.back()) << chunk;
  }
}

TEST(Collectives, HalvesAreSummedInFloat) {
  // 1 in bfloat16 is 0x3f80, in half 0x3c00.
  std::vector<std::uint16_t> bf16(5, 0x3f80), f16(5, 0x3c00);
  Collectives collectives(world());
  collectives.all_reduce(bf16.data(), 5, Dtype::bf16, ReduceOp::sum).wait();
  collectives.all_reduce(f16.data(), 5, Dtype::f16, ReduceOp::sum).wait();
  const std::vector<std::uint16_t> want_bf16{0, 0x3f80, 0x4000, 0x4040, 0x4080};
  const std::vector<std::uint16_t> want_f16{0, 0x3c00, 0x4000, 0x4200, 0x4400};
  const auto n = static_cast<std::size_t>(world().size());
  EXPECT_EQ(bf16[4], want_bf16.at(n));
  EXPECT_EQ(f16[4], want_f16.at(n));
}

TEST(Collectives, RefusesWhatHasNoMeaning) {
  float value = 0;
  EXPECT_THROW(Collectives(world()).all_reduce(&value, 1, Dtype::f32, ReduceOp::bit_or), Error);
}

TEST(Collectives, WaitEndsAtItsLimit) {
  int value = 0;
  auto receive = std::make_shared<int>(0);
  auto request = Collectives(world().duplicate()).receive(receive.get(), 1, Dtype::i32, world().rank(), 7);
  request.keep(receive);
  try {
    request.wait(50ms);
    FAIL() << "nobody has sent";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::retry);
    EXPECT_NE(std::string(error.what()).find("receive"), std::string::npos);
  }
  EXPECT_EQ(value, 0);
}

TEST(Collectives, WhatIsGivenUpIsNotWrittenLater) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  if (world().topology().num_nodes > 1) GTEST_SKIP() << "over nodes such memory is kept";
  const auto channel = world().duplicate(), aside = world().duplicate();
  Collectives collectives(channel);
  const int last = world().size() - 1;
  for (const std::size_t count : {1UL, 5'000UL, 400'000UL})
    for (const int kind : {0, 1, 2}) {
      const double own = world().rank() + 1;
      std::vector<double> values(count, own);
      const auto start = [&] {
        if (kind == 0) return collectives.all_reduce(values.data(), count, Dtype::f64, ReduceOp::sum);
        if (kind == 1) return collectives.broadcast(values.data(), count * sizeof(double), Dtype::u8, last);
        return collectives.reduce(values.data(), count, Dtype::f64, ReduceOp::sum, 0);
      };
      if (world().rank() == 0) static_cast<void>(start());
      aside.barrier();
      if (world().rank() != 0) start().wait();
      channel.barrier();
      const double sum = world().size() * (world().size() + 1) / 2.0;
      const double want = world().rank() == 0 || kind == 2 ? own : kind == 0 ? sum : last + 1;
      EXPECT_EQ(values, std::vector<double>(count, want)) << count << " elements, operation " << kind;
    }
}

TEST(Communicator, ASumThatTimesOutLeavesTheCallersMemory) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  if (world().topology().num_nodes > 1) GTEST_SKIP() << "over nodes nobody drives what was given up";
  const auto channel = world().duplicate(), aside = world().duplicate();
  std::vector<double> values(1000, 1.0);
  if (world().rank() == 0) {
    const ScopedTimeout brief(world(), 50ms);
    EXPECT_THROW(channel.all_reduce(std::span(values)), Error);
  }
  aside.barrier();
  if (world().rank() != 0) channel.all_reduce(std::span(values));
  channel.barrier();
  EXPECT_EQ(values[999], world().rank() == 0 ? 1.0 : world().size());
}

TEST(OnRanks, EveryoneHearsTheValueOrTheError) {
  int calls = 0;
  EXPECT_EQ(run_on_root(world(), [&] { return ++calls, std::string("yes"); }), "yes");
  EXPECT_EQ(calls, world().rank() == 0 ? 1 : 0);
  try {
    run_on_root(world(), []() -> std::string { throw Error(ExitCode::data, "opening a", "it is not there", "Look"); });
    FAIL() << "no Error was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_STREQ(error.what(), "opening a: it is not there. Look");
  }
}

TEST(OnRanks, OneRanksErrorIsEverybodys) {
  const int bad = world().size() - 1;
  const auto values = run_on_all(world(), [] { return "from " + std::to_string(world().rank()); });
  for (int r = 0; r < world().size(); ++r) EXPECT_EQ(values[static_cast<std::size_t>(r)], "from " + std::to_string(r));
  try {
    run_on_all(world(), [&]() -> std::string {
      if (world().rank() == bad) throw Error(ExitCode::retry, "writing a", "the disk is full");
      return {};
    });
    FAIL() << "no Error was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::retry);
    EXPECT_TRUE(error.agreed());
    const std::string text = error.what();
    EXPECT_EQ(text.find("rank " + std::to_string(bad)) != std::string::npos, world().size() > 1) << text;
    EXPECT_NE(text.find("writing a: the disk is full"), std::string::npos);
  }
}

/// The text of the outcome if `thrower` throws.
std::string text_thrown_by(const std::function<void()>& thrower) {
  try {
    thrower();
  } catch (...) {
    return current_outcome().text;
  }
  return "nothing was thrown";
}

TEST(Outcome, KeepsTheTextOfAnyException) {
  EXPECT_EQ(text_thrown_by([] { throw std::string("words"); }), "words");
  EXPECT_EQ(text_thrown_by([] { throw "a literal"; }), "a literal");
  EXPECT_EQ(text_thrown_by([] { throw 7; }), "an exception that is not a std::exception: int");
  EXPECT_EQ(text_thrown_by([] { throw std::runtime_error(""); }),
            "an exception of the type std::runtime_error without a text");
  EXPECT_EQ(text_thrown_by([] {
              try {
                try {
                  throw std::string("inner");
                } catch (...) {
                  std::throw_with_nested(std::invalid_argument("middle"));
                }
              } catch (...) {
                std::throw_with_nested(std::runtime_error("outer"));
              }
            }),
            "outer: middle: inner");
}

TEST(Agreement, EveryRankHearsEveryOutcome) {
  const Outcome mine{Outcome::Kind::done, ExitCode::done, false, "from " + std::to_string(world().rank())};
  const auto outcomes = agree(world(), mine, 30s);
  for (int r = 0; r < world().size(); ++r)
    EXPECT_EQ(outcomes[static_cast<std::size_t>(r)].text, "from " + std::to_string(r));
}

// One rank raises an alarm while the others wait in a collective; twice, so that a stale notice would be seen.
TEST(Agreement, AnErrorOnOneRankFreesTheOthers) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  for (int attempt = 0; attempt < 3; ++attempt) {
    const int bad = attempt % world().size();
    const auto channel = world().duplicate();
    Outcome mine;
    if (world().rank() == bad) {
      mine = {Outcome::Kind::failed, ExitCode::data, false, "bad sample " + std::to_string(attempt)};
      raise_alarm(world(), mine);
    } else {
      try {
        channel.barrier();
        FAIL() << "the barrier cannot finish";
      } catch (const RemoteError& error) {
        EXPECT_EQ(error.rank(), bad);
        EXPECT_EQ(error.code(), ExitCode::data);
        EXPECT_NE(std::string(error.what()).find("bad sample " + std::to_string(attempt)), std::string::npos);
        EXPECT_THROW(channel.barrier(), RemoteError) << "it stays raised until all have agreed";
        mine = current_outcome();
        EXPECT_EQ(mine.kind, Outcome::Kind::interrupted);
      }
    }
    const auto outcomes = agree(world(), mine, 30s);
    EXPECT_EQ(outcomes[static_cast<std::size_t>(bad)].kind, Outcome::Kind::failed);
    const auto cause = root_cause(outcomes, world().topology().hosts);
    ASSERT_TRUE(cause);
    EXPECT_EQ(std::string(cause->what()), "rank " + std::to_string(bad) + " (" +
                                              world().topology().hosts[static_cast<std::size_t>(bad)] +
                                              "): bad sample " + std::to_string(attempt));
    EXPECT_EQ(world().duplicate().all_reduce(std::int64_t{1}), world().size()) << "fresh channels work again";
  }
}

TEST(Agreement, AllRanksMayFailAtOnce) {
  agree(world(), {}, 30s);  // nobody is still in a collective of the test before, where the alarm would be heard
  const Outcome mine{Outcome::Kind::failed, ExitCode::user_error, false, "ours"};
  raise_alarm(world(), mine);
  const auto outcomes = agree(world(), mine, 30s);
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.kind, Outcome::Kind::failed);
  EXPECT_STREQ(root_cause(outcomes, world().topology().hosts)->what(), "ours")
      << "no rank is named if all say the same";
  EXPECT_NO_THROW(world().duplicate().barrier());
}

const Timeouts half_a_minute{.done = 30s, .failed = 30s};

// The exception of a rank between two calls reaches the ranks in the second call, whatever they do there.
TEST(Agreement, OneMayFailWhileOthersAreFurtherIn) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const std::vector<std::function<void()>> works{
      [] {},
      [] { world().barrier(); },
      [] { check_on_all(world(), half_a_minute, [] {}); },
      [] { attempt_on_all(world(), half_a_minute, [] { world().duplicate().barrier(); }); },
  };
  for (std::size_t which = 0; which < works.size(); ++which) {
    const int bad = static_cast<int>(which) % world().size();
    bool came_back = false;
    const auto error = attempt_on_all(world(), half_a_minute, [&] {
      attempt_on_all(world(), half_a_minute, [] { world().barrier(); });  // in which all are
      if (world().rank() == bad) throw Error(ExitCode::data, "working", "between two calls", "");
      // A rank that ignores the alarm gets it again.
      for (int time = 0; time < 2; ++time)
        EXPECT_THROW(static_cast<void>(attempt_on_all(world(), half_a_minute, works[which])), Error);
      // Also in calls in which the failed rank does not take part, after which all would be out of step.
      EXPECT_THROW(world().barrier(), RemoteError);
      EXPECT_THROW(static_cast<void>(world().duplicate()), RemoteError);
      attempt_on_all(world(), half_a_minute, works[which]);
      came_back = true;
    });
    EXPECT_FALSE(came_back);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ExitCode::data);
    EXPECT_EQ(std::string(error->what()), "rank " + std::to_string(bad) + " (" +
                                              world().topology().hosts[static_cast<std::size_t>(bad)] +
                                              "): working: between two calls");
    EXPECT_EQ(world().all_reduce(std::int64_t{1}), world().size()) << "all are together again";
    EXPECT_NO_THROW(world().duplicate().barrier());
  }
}

TEST(Agreement, OneThatDoesNotMakeTheCallsOfTheOthersIsNamed) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const int odd = world().size() - 1;
  const auto error = attempt_on_all(world(), half_a_minute, [&] {
    if (world().rank() != odd) attempt_on_all(world(), half_a_minute, [] {});
  });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ExitCode::user_error);
  EXPECT_NE(std::string(error->what()).find("rank 0 is in a call that rank " + std::to_string(odd) + " does not make"),
            std::string::npos)
      << error->what();
  EXPECT_FALSE(attempt_on_all(world(), half_a_minute, [] { world().barrier(); }));
}

/// Continues until it is done, whatever alarms the others raise.
void finish(Request request) {
  for (bool done = false; !done;) try {
      done = request.done();
    } catch (const RemoteError&) {
    }
}

/// Waits for a message that nobody sends.
void hear_of_another(const Communicator& channel) {
  auto nothing = std::make_shared<int>(0);
  auto request = Collectives(channel).receive(nothing.get(), 1, Dtype::i32, channel.rank(), 7);
  request.keep(nothing);
  request.wait(30s);
}

// Each rank fails before it learns of another failure, raises an alarm, and learns of the others while it unwinds.
TEST(Agreement, ARankThatHasRaisedStaysACause) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const auto channel = world().duplicate();
  const auto text = "trouble of " + std::to_string(world().rank());
  Outcome first, second;
  try {
    throw Error(ExitCode::data, text);
  } catch (...) {
    first = current_outcome(world());
    finish(Collectives(channel).barrier());
    raise_alarm(world(), first);
    EXPECT_THROW(hear_of_another(channel), RemoteError);
    second = current_outcome(world());
  }
  EXPECT_EQ(second.kind, Outcome::Kind::failed);
  EXPECT_EQ(second.text, text);
  const auto outcomes = agree(world(), {Outcome::Kind::interrupted, ExitCode::data, false, "of another"}, 30s);
  for (int r = 0; r < world().size(); ++r) {
    const auto& outcome = outcomes[static_cast<std::size_t>(r)];
    EXPECT_EQ(outcome.kind, Outcome::Kind::failed);
    EXPECT_EQ(outcome.text, "trouble of " + std::to_string(r));
  }
  const auto cause = root_cause(outcomes, world().topology().hosts);
  ASSERT_TRUE(cause);
  EXPECT_NE(std::string(cause->what()).find("trouble of 0"), std::string::npos);
}

/// Calls that create communicators or memory, in which all ranks take part.
std::vector<std::function<void(const Communicator&)>> makers() {
  std::vector<std::function<void(const Communicator&)>> all{[](const Communicator& of) { of.duplicate(); },
                                                            [](const Communicator& of) { of.split(0); }};
  if (shares()) all.emplace_back([](const Communicator& of) { of.shared_memory(100'000); });
  return all;
}

TEST(Agreement, AFailureIsHeardWhereCommunicatorsAreMade) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  for (const auto& make : makers())
    for (int bad = 0; bad < world().size(); ++bad) {
      const auto channel = world().duplicate();
      Outcome mine;
      if (world().rank() == bad) {
        mine = {Outcome::Kind::failed, ExitCode::data, false, "bad luck"};
        raise_alarm(world(), mine);
      } else {
        try {
          make(channel);
          ADD_FAILURE() << "rank " << bad << " has not come";
        } catch (const RemoteError& error) {
          EXPECT_EQ(error.rank(), bad);
          mine = current_outcome();
        }
      }
      agree(world(), mine, 30s);
      for (const auto& again : makers()) again(world());
    }
}

/// Works until another rank fails.
Outcome wait_for_alarm(const Communicator& alone) {
  try {
    wait_on(
        alone, [] { return false; }, [] { return std::string("listening"); }, 60s);
  } catch (const RemoteError&) {
    return current_outcome();
  }
  return {};
}

TEST(Agreement, WhereCommunicatorsAreMadeNobodyWaitsForGood) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  for (const auto& make : makers())
    for (int absent = 0; absent < world().size(); ++absent) {
      const auto channel = world().duplicate(), alone = world().split(world().rank());
      Outcome mine;
      if (world().rank() != absent) try {
          const ScopedTimeout brief(world(), 100ms);
          make(channel);
          ADD_FAILURE() << "rank " << absent << " has not come";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ExitCode::retry);
          mine = current_outcome();
          raise_alarm(world(), mine);
        }
      else
        mine = wait_for_alarm(alone);  // not gone, which is another mistake
      agree(world(), mine, 60s);
      EXPECT_EQ(world().duplicate().all_reduce(std::int64_t{1}), world().size());
    }
}

TEST(Agreement, WhereCommunicatorsAreMadeItIsSeenWhoHasReturned) {
  if (!shares() || world().topology().num_nodes > 1) GTEST_SKIP() << "needs another rank of this node";
  for (const auto& make : makers())
    for (int absent = 0; absent < world().size(); ++absent) {
      const auto channel = world().duplicate();
      Outcome mine;
      if (world().rank() != absent) try {
          const ScopedTimeout brief(world(), 10s);
          make(channel);
          ADD_FAILURE() << "rank " << absent << " has not come";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ExitCode::user_error);
          EXPECT_NE(std::string(error.what()).find("rank " + std::to_string(absent) + " "), std::string::npos)
              << error.what();
          mine = current_outcome();
          raise_alarm(world(), mine);
        }
      agree(world(), mine, 60s);
      EXPECT_EQ(world().duplicate().all_reduce(std::int64_t{1}), world().size());
    }
}

// A rank outside the communicator fails just when its members meet: the call succeeds on all members or on none.
TEST(Agreement, AFailureElsewhereDividesNobody) {
  if (world().size() < 3) GTEST_SKIP() << "needs three ranks";
  const int bad = world().size() - 1;
  for (int round = 0; round < 50; ++round) {
    const auto members = world().split(world().rank() == bad ? 1 : 0);
    Outcome mine;
    if (world().rank() == bad) {
      std::this_thread::sleep_for(std::chrono::microseconds(40 * round));
      mine = {Outcome::Kind::failed, ExitCode::data, false, "elsewhere"};
      raise_alarm(world(), mine);
    } else {
      try {
        for (;;) members.duplicate();
      } catch (const RemoteError&) {
        mine = current_outcome();
      }
    }
    agree(world(), mine, 30s);
  }
}

TEST(Agreement, TheWorldIsInStepAgain) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const int bad = world().size() - 1;
  Outcome mine;
  if (world().rank() == bad) {
    mine = {Outcome::Kind::failed, ExitCode::data, false, "bad luck"};
    raise_alarm(world(), mine);
  } else {
    EXPECT_THROW(world().all_gather("stale"), RemoteError);
    EXPECT_THROW(world().barrier(), RemoteError);
    mine.kind = Outcome::Kind::interrupted;
  }
  agree(world(), mine, 30s);
  const auto values = world().all_gather(std::to_string(world().rank()));
  for (int r = 0; r < world().size(); ++r) EXPECT_EQ(values[static_cast<std::size_t>(r)], std::to_string(r));
  EXPECT_EQ(world().broadcast(std::to_string(world().rank()), bad), std::to_string(bad));
  EXPECT_EQ(world().all_reduce(std::int64_t{1}), world().size());
}

std::set<std::string> segments() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    if (const auto name = entry.path().filename().string(); name.starts_with("muster.")) names.insert(name);
  return names;
}

TEST(Agreement, MemoryThatIsMadeWhenARankFailsGoesWithItsUsers) {
  if (!shares()) GTEST_SKIP() << "needs another rank on its node";
  const auto channel = world().duplicate();
  const auto before = segments();
  Outcome mine;
  if (world().rank() == world().size() - 1) {
    mine = {Outcome::Kind::failed, ExitCode::data, false, "bad luck"};
    raise_alarm(world(), mine);
  } else {
    EXPECT_THROW(channel.shared_memory(1'000'000), RemoteError);
    mine.kind = Outcome::Kind::interrupted;
  }
  agree(world(), mine, 30s);
  // Other programs on this machine create and remove theirs at the same time.
  std::set<std::string> left;
  const auto all_gone = [&] {
    left.clear();
    const auto now = segments();
    std::set_difference(now.begin(), now.end(), before.begin(), before.end(), std::inserter(left, left.end()));
    return left.empty();
  };
  EXPECT_TRUE(wait_until(all_gone, 20s)) << *left.begin();
}

TEST(WaitTime, DoesNotCountTimeInWhichItsProcessDidNotRun) {
  const WaitTime::Clock::time_point begin{1h};
  WaitTime time(begin);
  for (auto at = 0ms; at <= 4500ms; at += 900ms) EXPECT_EQ(time.until(begin + at), at);
  EXPECT_EQ(time.suspended(), 0s);
  EXPECT_EQ(time.until(begin + 1h), 4500ms) << "the job was suspended";
  EXPECT_EQ(time.suspended(), 1h - 4500ms);
  EXPECT_EQ(time.until(begin + 1h + 500ms), 5s);
}

TEST(WaitTime, EndsThoughItsProcessPausesNowAndThen) {
  WaitTime::Clock::time_point now{1h};
  WaitTime time(now);
  for (int pause = 0; pause < 10; ++pause) {
    time.until(now += 900ms);
    time.until(now += 2s);
  }
  EXPECT_EQ(time.until(now), 9s);
  EXPECT_EQ(time.suspended(), 20s);
}

TEST(Agreement, RanksThatLeftWithoutACauseAreAnError) {
  const Outcome left{Outcome::Kind::interrupted, ExitCode::retry, false, "rank 1 failed: lost"};
  const auto cause = root_cause({{}, left}, {"here", "there"});
  ASSERT_TRUE(cause);
  EXPECT_EQ(cause->code(), ExitCode::retry);
  EXPECT_STREQ(cause->what(), "rank 1 (there): rank 1 failed: lost");
  EXPECT_FALSE(root_cause({{}, {}}, {"here", "there"}));
}

}  // namespace
}  // namespace muster::detail::comm::comm_test
