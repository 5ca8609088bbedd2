// A rank's record of its calls, read by others while it writes.
#include "watch/process.hpp"
#include "watch/record.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace muster::detail::watch::watch_test {
namespace {

using namespace std::chrono_literals;

Call sum(std::size_t count) { return {.kind = Call::Kind::all_reduce, .type = node::Dtype::f32, .count = count}; }

/// Zeroes, as the shared memory is.
std::unique_ptr<CallLog> calls() { return std::make_unique<CallLog>(); }

TEST(Call, IsWhatItsWordSays) {
  for (const auto& call :
       {sum(0), sum(1024), sum((std::size_t{1} << 35) - 1), Call{.kind = Call::Kind::barrier},
        Call{.kind = Call::Kind::all_to_all, .count = 3, .from_all = true},
        Call{.kind = Call::Kind::broadcast, .root = 70'000, .count = 3},
        Call{.kind = Call::Kind::reduce, .type = node::Dtype::boolean, .op = ReduceOp::bit_xor, .root = 0, .count = 5},
        Call{.kind = Call::Kind::receive, .type = node::Dtype::c128, .root = -1, .count = 2}}) {
    const auto again = Call::decode(call.encode());
    EXPECT_EQ(again.text(), call.text());
    EXPECT_EQ(again.encode(), call.encode());
    EXPECT_EQ(again.needs_all(), call.needs_all());
    EXPECT_NE(call.encode(), 0U);
  }
  EXPECT_EQ(sum(1024).text(), "all_reduce(float32 [1024], sum)");
  EXPECT_EQ((Call{.kind = Call::Kind::barrier}).text(), "barrier()");
  EXPECT_EQ((Call{.kind = Call::Kind::receive, .count = 7}).text(), "receive(uint8 [7], any rank)");
  EXPECT_NE(sum(1024).encode(), sum(1025).encode());
}

TEST(Call, IsCountedInWords) {
  const std::vector<std::pair<std::uint64_t, std::string>> cases{{1, "1st"},   {2, "2nd"},   {3, "3rd"},
                                                                 {4, "4th"},   {11, "11th"}, {12, "12th"},
                                                                 {13, "13th"}, {21, "21st"}, {112, "112th"}};
  for (const auto& [number, text] : cases) EXPECT_EQ(node::nth(number), text);
}

TEST(CallLog, KeepsTheLastOnes) {
  const auto record = calls();
  EXPECT_TRUE(record->last().empty());
  for (std::uint64_t i = 1; i <= 200; ++i) {
    const auto ticket =
        record->begin(7, i, sum(i), i % 2 == 0 ? "muster:allreduce_of_a_very_long_name_indeed" : nullptr);
    if (i < 200) record->end(ticket);
  }
  const auto last = record->last(3);
  ASSERT_EQ(last.size(), 3U);
  EXPECT_EQ(last[0].call_number, 198U);
  EXPECT_EQ(last[2].call_number, 200U);
  EXPECT_EQ(last[2].call.count, 200U);
  EXPECT_EQ(last[2].ended, 0ns);
  EXPECT_GT(last[1].ended, 0ns);
  EXPECT_EQ(last[1].text(), "all_reduce(float32 [199], sum)");
  EXPECT_TRUE(last[2].text().starts_with("muster:allreduce_of_a_very_long_")) << last[2].text();
  EXPECT_EQ(record->last().size(), CallLog::slots);
  EXPECT_TRUE(record->find(7, 200 - CallLog::slots + 1));
  EXPECT_FALSE(record->find(7, 200 - CallLog::slots));
  EXPECT_FALSE(record->find(8, 200));
}

TEST(CallCounts, SayHowFarARankIs) {
  const auto turns = std::make_unique<CallCounts>();
  EXPECT_FALSE(turns->begun(7));
  const auto slot = turns->open(7);
  EXPECT_EQ(turns->begun(7), 0U);
  turns->begin(slot, 7, 3);
  EXPECT_EQ(turns->begun(7), 3U);
  for (std::uint64_t channel = 8; channel < 8 + CallCounts::slots; ++channel) turns->open(channel);
  EXPECT_FALSE(turns->begun(7)) << "others have taken its place";
  turns->begin(slot, 7, 4);
  EXPECT_EQ(turns->begun(7 + CallCounts::slots), 0U);
}

TEST(CallLog, AreNamedByWhatGoesOn) {
  const auto record = calls();
  {
    const ScopedCallName report("report");
    {
      const ScopedCallName save("save");
      record->begin(1, 1, sum(1), nullptr);
    }
    record->begin(1, 2, sum(1), nullptr);
    record->begin(1, 3, sum(1), "muster:allreduce");
  }
  record->begin(1, 4, sum(1), nullptr);
  std::vector<std::string> names;
  for (const auto& entry : record->last()) names.push_back(entry.name);
  EXPECT_EQ(names, (std::vector<std::string>{"save", "report", "muster:allreduce", ""}));
}

// All fields of an entry have the same number, so that a torn entry is noticed.
TEST(CallLog, AreReadWholeWhileOthersAreWritten) {
  const auto record = calls();
  std::atomic<bool> over{false};
  std::vector<std::thread> writers;
  for (std::uint64_t w = 1; w <= 2; ++w)
    writers.emplace_back([&, w] {
      for (std::uint64_t i = 1; !over; ++i) record->end(record->begin(i, i, sum(i), w == 1 ? nullptr : "a name"));
    });
  std::size_t read = 0;
  const auto end = std::chrono::steady_clock::now() + 300ms;
  while (std::chrono::steady_clock::now() < end)
    for (const auto& entry : record->last()) {
      ++read;
      ASSERT_EQ(entry.channel, entry.call_number);
      ASSERT_EQ(entry.call.count, entry.call_number);
      ASSERT_TRUE(entry.name.empty() || entry.name == "a name") << entry.name;
    }
  over = true;
  for (auto& writer : writers) writer.join();
  EXPECT_GT(read, 0U);
}

TEST(Process, SaysWhenItIsStoppedOrGone) {
  EXPECT_EQ(state_of(::getpid(), start_time_of(::getpid())), "");
  const pid_t child = ::fork();
  if (child == 0)
    for (;;) ::pause();
  const auto started = start_time_of(child);
  EXPECT_GT(started, 0);
  ::kill(child, SIGSTOP);
  int status = 0;
  ::waitpid(child, &status, WUNTRACED);
  EXPECT_NE(state_of(child, started).find("stopped (State T"), std::string::npos) << state_of(child, started);
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  EXPECT_NE(state_of(child, started).find("is gone"), std::string::npos);
}

[[gnu::noinline]] void stand_here(const std::atomic<bool>& over) {
  while (!over) ::usleep(1000);
}

TEST(MainThreadStack, IsTakenByAnotherThread) {
  const MainThreadStack main;
  std::atomic<bool> over{false};
  std::string text;
  std::thread other([&] {
    // The first one may come before the thread waits.
    for (int i = 0; i < 1000 && text.find("sleep") == std::string::npos; ++i) text = main.take();
    over = true;
  });
  stand_here(over);
  other.join();
  EXPECT_NE(text.find('\n'), std::string::npos) << text;
  EXPECT_NE(text.find("sleep"), std::string::npos) << text;
}

TEST(MainThreadStack, SaysWhenTheThreadHeedsNoSignal) {
  const MainThreadStack main;
  std::string text;
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread other([&] { text = main.take(); });
  other.join();
  EXPECT_TRUE(text.starts_with("no stack")) << text;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace
}  // namespace muster::detail::watch::watch_test
