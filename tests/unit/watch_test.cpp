// A rank's record of its calls, read by others while it writes.
#include "support/folder.hpp"
#include "watch/host_load.hpp"
#include "watch/process.hpp"
#include "watch/record.hpp"
#include "watch/step_log.hpp"
#include "watch/time_use.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
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

/// Uses the processor for a millisecond or more.
void work() {
  for (const auto end = std::chrono::steady_clock::now() + 1ms; std::chrono::steady_clock::now() < end;) {
  }
}

TEST(TimeUse, TheInnermostScopeCounts) {
  const auto before = time_use();
  {
    const ScopedActivity reading(Activity::data);
    work();
    {
      const ScopedActivity waiting(Activity::wait);
      work();
      const ScopedActivity more(Activity::wait);
      work();
    }
    work();
  }
  const auto use = time_use() - before;
  EXPECT_GE(use.data, 2ms);
  EXPECT_GE(use.wait, 2ms);
  EXPECT_EQ(use.save, 0ms);
  work();
  EXPECT_EQ((time_use() - before).data, use.data) << "outside of a scope the thread computes";
}

TEST(TimeUse, WhatASaveWaitsForOtherRanksIsCountedApart) {
  const auto before = time_use();
  {
    const ScopedActivity saving(Activity::save);
    {
      const ScopedActivity waiting(Activity::wait);
      work();
    }
    EXPECT_GE((time_use() - before).save_wait, 1ms);
    const ScopedActivity reading(Activity::data);
    work();
  }
  const auto use = time_use() - before;
  EXPECT_GE(use.save, 1ms);
  EXPECT_GE(use.save_wait, 1ms);
  EXPECT_EQ(use.wait + use.data, 0ms);
  EXPECT_EQ(use.sum(), use.save + use.save_wait);
}

TEST(TimeUse, IsOfTheThread) {
  const auto before = time_use();
  std::thread other([] {
    const ScopedActivity waiting(Activity::wait);
    const ScopedFileRead reading;
    work();
  });
  const auto read_before = file_read_time();
  other.join();
  EXPECT_EQ((time_use() - before).wait, 0ms);
  EXPECT_GT(file_read_time(), 0ms) << "but reading is of the process";
  EXPECT_GE(file_read_time(), read_before);
}

/// What the kernel shows, written by hand.
class Kernel {
 public:
  explicit Kernel(const std::string& groups = "0::/job/rank\n") {
    write("proc/thread-self/schedstat", "1000 2500 7\n");
    write("proc/self/cgroup", groups);
    write("proc/self/stat", "42 (a (b) c) S 1 2 3 4 5 6 7 8 99 10 3 4\n");
    write("proc/self/statm", "1000 3 2\n");
  }
  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((folder_ / path).parent_path());
    std::ofstream(folder_ / path) << text;
  }
  void heat(int count) const {
    for (int cpu = 0; cpu < ::get_nprocs_conf(); ++cpu)
      write("sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/thermal_throttle/core_throttle_count",
            std::to_string(count) + "\n");
  }
  const std::filesystem::path& root() const { return folder_.path(); }

 private:
  test::Folder folder_;
};

TEST(HostLoad, IsWhatTheKernelCounts) {
  const Kernel kernel;
  kernel.write("sys/fs/cgroup/job/rank/cpu.stat",
               "usage_usec 5\nnr_throttled 3\nnot_throttled_usec 9\nthrottled_usec 70\n");
  kernel.heat(4);
  HostLoadReader reader(kernel.root());
  auto load = reader.read();
  EXPECT_EQ(load.run_queue_ns, 2500);
  EXPECT_EQ(load.throttled_ns, 70'000);
  EXPECT_EQ(load.major_faults, 99);
  EXPECT_EQ(load.clock_throttles, 0) << "what was before does not count";
  kernel.heat(6);
  kernel.write("proc/thread-self/schedstat", "1000 3500 7\n");
  load = reader.read();
  EXPECT_EQ(load.run_queue_ns, 3500) << "files are read again, not opened again";
  EXPECT_EQ(load.other_threads_ns, 7 * 1'000'000'000LL / ::sysconf(_SC_CLK_TCK) - 1000) << "of 7 ticks";
  EXPECT_EQ(load.clock_throttles, 2);
  EXPECT_EQ(memory_bytes(kernel.root()), 3 * ::sysconf(_SC_PAGESIZE));
}

TEST(HostLoad, IsOfTheThreadThatHadToWaitTheLongest) {
  const Kernel kernel;
  kernel.write("proc/self/task/43/schedstat", "1000 9000 7\n");
  kernel.write("proc/self/task/44/schedstat", "1000 100 7\n");
  HostLoadReader reader(kernel.root());
  const auto before = reader.read().run_queue_ns;
  reader.watch_threads({43, 44, 45});
  EXPECT_EQ(reader.read().run_queue_ns, before) << "what was before does not count, nor a thread that is gone";
  kernel.write("proc/thread-self/schedstat", "1000 2600 7\n");
  kernel.write("proc/self/task/43/schedstat", "1000 9700 7\n");
  kernel.write("proc/self/task/44/schedstat", "1000 400 7\n");
  EXPECT_EQ(reader.read().run_queue_ns, before + 700) << "they wait at the same time";
  kernel.write("proc/self/task/44/schedstat", "1000 900 7\n");
  EXPECT_EQ(reader.read().run_queue_ns, before + 1200);
}

TEST(HostLoad, OfTheFirstVersionOfControlGroups) {
  const Kernel kernel("4:memory:/elsewhere\n2:cpuset,cpu:/job\n0::/\n");
  kernel.write("sys/fs/cgroup/cpu/job/cpu.stat", "nr_periods 1\nthrottled_time 1234\n");
  EXPECT_EQ(HostLoadReader(kernel.root()).read().throttled_ns, 1234);
}

TEST(HostLoad, IsZeroWhereTheKernelDoesNotTell) {
  const test::Folder nothing;
  const auto load = HostLoadReader(nothing.path()).read();
  EXPECT_EQ(load.run_queue_ns + load.throttled_ns + load.major_faults + load.clock_throttles, 0);
  EXPECT_EQ(memory_bytes(nothing.path()), 0);
  const Kernel broken("no colons here\n0::");
  broken.write("proc/self/stat", "42 (no end");
  broken.write("proc/thread-self/schedstat", "");
  EXPECT_EQ(HostLoadReader(broken.root()).read().major_faults, 0);
}

TEST(HostLoad, IsReadOnThisMachine) {
  HostLoadReader reader;
  const auto before = reader.read();
  work();
  const auto after = reader.read();
  EXPECT_GE(after.run_queue_ns, before.run_queue_ns);
  EXPECT_GE(after.major_faults, before.major_faults);
  EXPECT_GT(memory_bytes(), 1 << 20);
}

TEST(StepLog, KeepsTheLastSteps) {
  const auto log = std::make_unique<StepLog>();
  EXPECT_FALSE(log->read(1));
  for (std::uint64_t step = 1; step <= 100; ++step) {
    const auto value = static_cast<std::int64_t>(step);
    log->write(step, {.clock_ns = value, .wait_ns = 2 * value, .load = {.major_faults = 3 * value}, .memory_bytes = 7});
  }
  EXPECT_FALSE(log->read(100 - StepLog::slots));
  const auto last = log->read(100);
  ASSERT_TRUE(last);
  EXPECT_EQ(last->clock_ns, 100);
  EXPECT_EQ(last->wait_ns, 200);
  EXPECT_EQ(last->load.major_faults, 300);
  EXPECT_EQ(last->memory_bytes, 7);
  EXPECT_TRUE(log->read(100 - StepLog::slots + 1));
  EXPECT_FALSE(log->read(101));
}

TEST(StepLog, ASampleIsWholeOrNotThere) {
  const auto log = std::make_unique<StepLog>();
  std::atomic<bool> over{false};
  std::atomic<std::uint64_t> newest{0};
  std::thread writer([&] {
    for (std::uint64_t step = 1; !over; newest = step++) {
      const auto value = static_cast<std::int64_t>(step);
      log->write(step, {.clock_ns = value, .save_ns = value, .load = {.run_queue_ns = value}, .memory_bytes = value});
    }
  });
  for (int found = 0; found < 2000;) {
    const auto step = newest.load();
    const auto sample = log->read(step);
    if (step == 0 || !sample) continue;  // not begun, or overwritten meanwhile
    ++found;
    const auto value = static_cast<std::int64_t>(step);
    EXPECT_EQ(sample->clock_ns, value);
    EXPECT_EQ(sample->save_ns, value);
    EXPECT_EQ(sample->load.run_queue_ns, value);
    EXPECT_EQ(sample->memory_bytes, value);
  }
  over = true;
  writer.join();
}

}  // namespace
}  // namespace muster::detail::watch::watch_test
