// Flags and environment of the ranks of a launch, which may differ between hosts.
#include "muster/launch.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"
#include "support/world.hpp"

#include <gtest/gtest.h>
#include <locale.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace muster::launch_test {
namespace {

using test::world;

/// Sets a variable of this rank's environment while it lives.
struct Variable {
  Variable(std::string variable, const std::string& value) : name(std::move(variable)) {
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  ~Variable() { ::unsetenv(name.c_str()); }
  std::string name;
};

struct Ended {
  int code = 0;
  bool began = false;
  std::string said;  // by rank 0
};

/// On all ranks.
Ended start(const std::vector<std::string>& flags, const std::function<void(Launch&)>& body,
            const std::function<void(CLI::App&)>& add_options = {}) {
  std::vector<std::string> words{"program"};
  words.insert(words.end(), flags.begin(), flags.end());
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  Launch launch(static_cast<int>(argv.size()), argv.data());
  if (add_options) add_options(launch.app());
  Ended ended;
  testing::internal::CaptureStderr();
  ended.code = launch.run([&] {
    ended.began = true;
    body(launch);
  });
  ended.said = world().broadcast(testing::internal::GetCapturedStderr());
  for (const char* variable : {"MUSTER_SEED", "MUSTER_NAME", "MUSTER_WIDTH", "MUSTER_THREADS"}) ::unsetenv(variable);
  return ended;
}

std::string place(int rank) {
  return "rank " + std::to_string(rank) + " (" + world().topology().hosts[static_cast<std::size_t>(rank)] + ")";
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(Run, EndsWithTheSameCodeOnAllRanks) {
  const auto code_of = [](int rank) { return rank == 0 ? 0 : 2 + rank; };
  char name[] = "program";
  char* argv[] = {name};
  Launch launch(1, argv);
  const int code = launch.run([&] { return code_of(launch.rank()); });
  EXPECT_EQ(code, code_of(world().size() == 1 ? 0 : 1)) << "that of the lowest rank which has not ended well";
}

TEST(Flags, WhatARankWasNotGivenItTakesFromRankZero) {
  std::optional<Variable> seed, name, width, threads;
  std::vector<std::string> flags{"--workers", "1"};
  if (world().rank() == 0) {
    seed.emplace("MUSTER_SEED", "3");
    name.emplace("MUSTER_NAME", "of rank 0");
    width.emplace("MUSTER_WIDTH", "7");
    threads.emplace("MUSTER_THREADS", "5");
    flags.insert(flags.end(), {"--set", "lr=0.1", "--set", "x=a b", "--resume", "never"});
  }
  int own = 0;
  const auto ended = start(
      flags,
      [&](Launch& launch) {
        EXPECT_EQ(launch.flags().seed, 3u);
        EXPECT_EQ(launch.flags().name, "of rank 0");
        EXPECT_EQ(launch.flags().threads, 5);
        EXPECT_EQ(launch.flags().workers, 1);
        EXPECT_EQ(launch.flags().resume, Resume::never);
        EXPECT_EQ(launch.flags().set, (std::vector<std::string>{"lr=0.1", "x=a b"}));
        EXPECT_EQ(own, 7);
      },
      [&](CLI::App& app) { app.add_option("--width", own)->required()->envname("MUSTER_WIDTH"); });
  EXPECT_EQ(ended.code, 0) << ended.said;
}

TEST(Flags, ASettingTakesOneWord) {
  std::vector<std::string> files;
  const auto ended = start(
      {"--set", "epochs=2", "lr=5", "--set", "x=1", "train.h5"},
      [&](Launch& launch) {
        EXPECT_EQ(launch.flags().set, (std::vector<std::string>{"epochs=2", "x=1"}));
        EXPECT_EQ(files, (std::vector<std::string>{"lr=5", "train.h5"}));
      },
      [&](CLI::App& app) { app.add_option("data", files); });
  EXPECT_EQ(ended.code, 0) << ended.said;
}

TEST(Flags, AnotherValueThanRankZerosIsAnErrorThatNamesBoth) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const int odd = world().size() - 1;
  for (const bool first_was_given : {true, false}) {
    std::optional<Variable> seed;
    if (world().rank() == odd) seed.emplace("MUSTER_SEED", "4");
    if (world().rank() != odd && first_was_given) seed.emplace("MUSTER_SEED", "3");
    const auto ended = start({}, [](Launch&) {});
    EXPECT_EQ(ended.code, 64);
    EXPECT_FALSE(ended.began);
    const std::string both =
        "--seed is 4 on " + place(odd) + " and " + (first_was_given ? "3" : "not given") + " on " + place(0);
    EXPECT_EQ(count(ended.said, both), 1) << ended.said;
  }
}

// The others are already in a call of muster or at the end of main.
TEST(Run, ALimitOnTheSizeOfFilesEndsNoRank) {
  const auto handler = [] {
    struct sigaction now {};
    ::sigaction(SIGXFSZ, nullptr, &now);
    return now.sa_handler;
  };
  ::signal(SIGXFSZ, SIG_DFL);
  start({}, [&](Launch&) { EXPECT_EQ(handler(), SIG_IGN); });
  const auto own = [](int) {};
  ::signal(SIGXFSZ, own);
  start({}, [&](Launch&) { EXPECT_EQ(handler(), static_cast<sighandler_t>(own)) << "that of the program"; });
  ::signal(SIGXFSZ, SIG_DFL);
}

TEST(Run, TheTimeOfEarlierStartsCountsWhateverTheClocksSay) {
  const Variable supervised("MUSTER_SUPERVISED", "1"), used("MUSTER_USED_SECONDS", "3000");
  double left_s = 0;
  const auto ended = start({"--time-limit", "1h"}, [&](Launch& launch) { left_s = launch.time_left()->count(); });
  EXPECT_EQ(ended.code, 0);
  EXPECT_GT(left_s, 500);
  EXPECT_LE(left_s, 600);
}

TEST(Run, TheEndOfTheJobIsThatOfTheFirstRankThatKnowsIt) {
  // The clock of the last rank is almost an hour ahead: by it, the job ends in a minute.
  const bool is_last = world().size() > 1 && world().rank() == world().size() - 1;
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  const Variable end("SLURM_JOB_END_TIME", std::to_string(now + (is_last ? 60 : 3600)));
  double left_s = 0;
  const auto ended = start({}, [&](Launch& launch) { left_s = launch.time_left()->count(); });
  EXPECT_EQ(ended.code, 0);
  EXPECT_GT(left_s, 3500) << "not ended early by one node";
}

TEST(Run, OneRankThrowsBetweenTwoCalls) {
  namespace comm = detail::comm;
  const comm::Timeouts limits{.done = std::chrono::hours(1), .failed = std::chrono::hours(1)};
  for (const bool another_call : {true, false}) {
    const int bad = world().size() - 1;
    const auto ended = start({}, [&](Launch& launch) {
      comm::check_on_all(launch.communicator(), limits, [] {});
      if (launch.rank() == bad) throw std::runtime_error("between two calls");
      if (another_call) comm::check_on_all(launch.communicator(), limits, [] {});
    });
    EXPECT_EQ(ended.code, 1);
    EXPECT_EQ(count(ended.said, "between two calls"), 1) << ended.said;
  }
}

TEST(Run, ALongCauseIsCutAtTheEndOfASentence) {
  std::string text;
  while (text.size() < 20'000) text += "One sentence of the cause. ";
  const auto ended = start({}, [&](Launch& launch) {
    if (launch.rank() == world().size() - 1) throw std::runtime_error(text);
  });
  EXPECT_EQ(ended.code, 1);
  EXPECT_EQ(count(ended.said, "One sentence of the cause. […]\n"), 1) << ended.said;
}

TEST(Run, OneRankMakesACallLess) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  namespace comm = detail::comm;
  const comm::Timeouts limits{.done = std::chrono::hours(1), .failed = std::chrono::hours(1)};
  const auto ended = start({}, [&](Launch& launch) {
    if (launch.rank() > 0) comm::check_on_all(launch.communicator(), limits, [] {});
  });
  EXPECT_EQ(ended.code, 1);
  EXPECT_EQ(count(ended.said, "rank 1 is in a call that rank 0 does not make"), 1) << ended.said;
}

TEST(Flags, NumbersHaveAPointWhateverTheLocale) {
  const auto folder = testing::TempDir() + "locale-" + std::to_string(::getpid());
  const auto make = "mkdir " + folder + " && localedef -i de_DE -f UTF-8 " + folder + "/comma > /dev/null 2>&1";
  const Variable path("LOCPATH", folder);
  const bool has_comma = std::system(make.c_str()) == 0 && ::setlocale(LC_NUMERIC, "comma") != nullptr;
  double width = 0;
  const auto add_width = [&](CLI::App& app) { app.add_option("--width", width); };
  std::optional<std::chrono::milliseconds> timeout;
  const auto ended = start(
      {"--timeout", "60.5", "--width=1.25"}, [&](Launch& launch) { timeout = launch.flags().timeout; }, add_width);
  ::setlocale(LC_NUMERIC, "C");
  std::filesystem::remove_all(folder);
  EXPECT_EQ(ended.code, 0) << ended.said;
  EXPECT_EQ(timeout, std::chrono::milliseconds(60'500));
  EXPECT_EQ(width, 1.25);
  if (!has_comma) GTEST_SKIP() << "no locale with a decimal comma can be made here (localedef)";
}

TEST(Flags, TheCommandLineWinsOnAllRanks) {
  const Variable seed("MUSTER_SEED", std::to_string(world().rank()));
  const auto ended = start({"--seed", "9"}, [](Launch& launch) { EXPECT_EQ(launch.flags().seed, 9u); });
  EXPECT_EQ(ended.code, 0) << ended.said;
}

TEST(Flags, ThreadsLevelsAndOptionsOfNoConcernMayDiffer) {
  const auto mine = std::to_string(world().rank() + 1);
  const Variable threads("MUSTER_THREADS", mine), level("MUSTER_LOG_LEVEL", world().rank() == 0 ? "info" : "warn"),
      place("SCRATCH_OF_THE_PROGRAM", mine);
  std::string own;
  const auto ended = start(
      {},
      [&](Launch& launch) {
        EXPECT_EQ(launch.threads_per_rank(), world().rank() + 1);
        EXPECT_EQ(own, mine);
      },
      [&](CLI::App& app) { app.add_option("--scratch", own)->envname("SCRATCH_OF_THE_PROGRAM"); });
  EXPECT_EQ(ended.code, 0) << ended.said;
}

TEST(Flags, AValueThatDoesNotParseOnOneHostEndsAll) {
  const int odd = world().size() - 1;
  for (const auto& [variable, value] :
       std::vector<std::pair<std::string, std::string>>{{"MUSTER_SEED", "three"},
                                                        {"MUSTER_WORKERS", "-1"},
                                                        {"MUSTER_LOG_LEVEL", "loud"},
                                                        {"MUSTER_TIME_LIMIT", "soon"}}) {
    if (odd != 0 && variable == "MUSTER_TIME_LIMIT") continue;  // differs first
    std::optional<Variable> set;
    if (world().rank() == odd) set.emplace(variable, value);
    const auto ended = start({}, [](Launch&) {});
    EXPECT_EQ(ended.code, 64) << variable;
    EXPECT_FALSE(ended.began);
    EXPECT_EQ(count(ended.said, "error:"), 1) << ended.said;
    EXPECT_NE(ended.said.find(value), std::string::npos) << ended.said;
    EXPECT_EQ(ended.said.find(place(odd)) != std::string::npos, world().size() > 1) << ended.said;
  }
}

struct Finding {
  std::optional<Error> error = {};
  ExitCode exit_code() const { return error ? error->code() : ExitCode::done; }
};

TEST(Run, EndsWithWhatTheBodyReturns) {
  const auto code_of = [](auto body) {
    std::string word = "program";
    char* argv = word.data();
    Launch launch(1, &argv);
    testing::internal::CaptureStderr();
    const int code = launch.run(body);
    return std::pair{code, world().broadcast(testing::internal::GetCapturedStderr())};
  };
  EXPECT_EQ(code_of([] {}).first, 0);
  EXPECT_EQ(code_of([] { return 3; }).first, 3);
  EXPECT_EQ(code_of([] { return Finding{}; }).first, 0);
  const auto [code, said] = code_of([] { return Finding{Error(ExitCode::data, "finding", "there is nothing")}; });
  EXPECT_EQ(code, 65);
  EXPECT_EQ(count(said, "finding: there is nothing"), 1) << said;
}

TEST(Flags, WhatAllRanksHaveWrongIsSaidOnce) {
  const auto ended = start({"--workers", "none"}, [](Launch&) {});
  EXPECT_EQ(ended.code, 64);
  EXPECT_EQ(count(ended.said, "error:"), 1) << ended.said;
  EXPECT_EQ(ended.said.find("rank "), std::string::npos) << ended.said;
}

}  // namespace
}  // namespace muster::launch_test
