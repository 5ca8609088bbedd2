// What is recorded for a trace, and the file that is made of it.
#include "watch/trace.hpp"
#include "base/file.hpp"
#include "muster/json.hpp"
#include "observe/trace_file.hpp"
#include "support/folder.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace muster::detail::trace_test {
namespace {

using watch::Trace;
using watch::TraceEvent;
using watch::TraceTrack;

std::vector<std::int64_t> numbers(const Trace& trace) {
  std::vector<std::int64_t> all;
  for (const auto& event : trace.events) all.push_back(event.number);
  return all;
}

TEST(Trace, HoldsWhatIsRecordedBetweenStartAndStop) {
  watch::record({.name = "before", .number = 1});
  watch::start_trace(10);
  { const watch::TraceSpan span("inside", 2); }
  watch::stop_trace();
  { const watch::TraceSpan span("while it is stopped", 3); }
  watch::start_trace(10);
  watch::record({.name = "again", .begin_ns = 1, .end_ns = 2, .number = 4});
  const auto trace = watch::take_trace();
  watch::record({.name = "after", .number = 5});
  EXPECT_EQ(numbers(trace), (std::vector<std::int64_t>{2, 4}));
  EXPECT_EQ(trace.dropped, 0U);
  EXPECT_LE(trace.events[0].begin_ns, trace.events[0].end_ns);
  EXPECT_EQ(trace.threads, std::vector<std::string>{"main thread"});
  EXPECT_TRUE(watch::take_trace().events.empty());
}

TEST(Trace, ASpanThatBeganOrEndsWhileNothingIsRecordedIsLeftOut) {
  {
    const watch::TraceSpan early("early");
    watch::start_trace(10);
  }
  {
    const watch::TraceSpan late("late");
    watch::stop_trace();
  }
  EXPECT_TRUE(watch::take_trace().events.empty());
}

TEST(Trace, KeepsTheNewestEvents) {
  for (const std::int64_t count : {0, 1, 4, 5, 6, 9, 10, 11, 23}) {
    watch::start_trace(5);
    for (std::int64_t i = 0; i < count; ++i) watch::record({.name = "one", .number = i});
    const auto trace = watch::take_trace();
    std::vector<std::int64_t> expected;
    for (auto i = std::max<std::int64_t>(0, count - 5); i < count; ++i) expected.push_back(i);
    EXPECT_EQ(numbers(trace), expected) << count;
    EXPECT_EQ(trace.dropped, static_cast<std::uint64_t>(std::max<std::int64_t>(0, count - 5))) << count;
  }
}

TEST(Trace, TellsThreadsApartAndMayBeTakenWhileTheyRecord) {
  std::atomic<bool> ends{false};
  std::atomic<int> recorded{0};
  std::vector<std::thread> threads;
  watch::start_trace(1000);
  for (int number = 0; number < 3; ++number)
    threads.emplace_back([&, number] {
      while (!ends) {
        watch::record({.name = "one", .begin_ns = 1, .end_ns = 2, .number = number});
        ++recorded;
      }
    });
  std::vector<Trace> traces;
  for (int i = 0; i < 20; ++i) {
    const int before = recorded;
    while (recorded < before + 300) std::this_thread::yield();
    traces.push_back(watch::take_trace());
    watch::start_trace(1000);
  }
  ends = true;
  for (auto& thread : threads) thread.join();
  watch::take_trace();
  for (const auto& trace : traces) {
    std::map<std::uint32_t, std::set<std::int64_t>> of_thread;
    for (const auto& event : trace.events) of_thread[event.thread].insert(event.number);
    for (const auto& [thread, seen] : of_thread) {
      EXPECT_LT(thread, trace.threads.size());
      EXPECT_EQ(seen.size(), 1U);
    }
  }
}

TEST(Trace, ComesBackFromItsBytes) {
  const Trace trace{.events = {{.name = "a", .begin_ns = 5, .end_ns = 7, .number = 3, .bytes = 9},
                               {.name = "b",
                                .track = TraceTrack::network,
                                .thread = 1,
                                .begin_ns = -5,
                                .end_ns = 1LL << 60,
                                .channel = ~0ULL,
                                .call = 1},
                               {.name = "a"}},
                    .threads = {"x", "y"},
                    .dropped = 12};
  const auto again = observe::unpack_trace(observe::pack_trace(trace));
  ASSERT_EQ(again.events.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    const auto &one = again.events[i], &other = trace.events[i];
    EXPECT_STREQ(one.name, other.name);
    EXPECT_EQ(std::tuple(one.track, one.thread, one.begin_ns, one.end_ns, one.channel, one.call, one.number, one.bytes),
              std::tuple(other.track, other.thread, other.begin_ns, other.end_ns, other.channel, other.call,
                         other.number, other.bytes));
  }
  EXPECT_EQ(again.threads, trace.threads);
  EXPECT_EQ(again.dropped, 12U);
  EXPECT_TRUE(observe::unpack_trace(observe::pack_trace({})).events.empty());
}

/// Two nodes: rank 0, and ranks 1 and 2. The second node's clock is `offset` behind at the time 0 and `offset + drift`
/// at the time 1,000,000 of the first node.
struct Clocks {
  Topology topology{.num_nodes = 2, .node_of_rank = {0, 1, 1}, .hosts = {"a", "b", "b"}};
  std::vector<comm::ClockOffset> before, after;

  Clocks(std::int64_t offset, std::int64_t drift) {
    using std::chrono::nanoseconds;
    const auto at = [](std::int64_t time) { return std::chrono::steady_clock::time_point(nanoseconds(time)); };
    before = {{.when = at(0)}, {.offset = nanoseconds(offset), .error = nanoseconds(40), .when = at(0)}};
    after = {{.when = at(1'000'000)},
             {.offset = nanoseconds(offset + drift), .error = nanoseconds(50), .when = at(1'000'000)}};
  }
  observe::TraceClocks get() const { return {topology, before, after}; }
};

TEST(TraceFile, PutsAllRanksOnTheClockOfRank0) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 1000; ++round) {
    const auto offset = static_cast<std::int64_t>(random() % 2'000'000'000'000) - 1'000'000'000'000;
    const auto drift = static_cast<std::int64_t>(random() % 1000) - 500;
    const Clocks clocks(offset, drift);
    const auto time = static_cast<std::int64_t>(random() % 1'500'000);  // of rank 0, also after the second measurement
    EXPECT_EQ(clocks.get().common_time(0, time), time);
    const auto there = time - offset - drift * time / 1'000'000;
    for (const int rank : {1, 2}) EXPECT_NEAR(clocks.get().common_time(rank, there), time, 2);
  }
}

Json read(const std::vector<Trace>& traces, const Clocks& clocks) {
  const test::Folder folder;
  const auto path = folder.path() / "trace.json";
  write_trace_file(path, traces, clocks.get());
  return Json::parse(read_file(path));
}

/// Adds a collective call, and a span of the same time in which the rank waits in it.
void add_call(Trace& trace, std::uint64_t number, std::int64_t begin, std::int64_t end) {
  trace.events.push_back({.name = "wait for ranks", .begin_ns = begin, .end_ns = end, .channel = 7, .call = number});
  trace.events.push_back(
      {.name = "barrier", .track = TraceTrack::calls, .begin_ns = begin, .end_ns = end, .channel = 7, .call = number});
}

TEST(TraceFile, NamesTheRankThatOthersWaitFor) {
  const Clocks clocks(5'000'000, 0);
  std::vector<Trace> traces(3, Trace{.threads = {"main thread"}});
  // Ranks 1 and 2 tell their own node's time. Rank 2 comes last to the first call, rank 0 to the second. Rank 1 did not
  // come to the third.
  const std::int64_t behind = 5'000'000;
  add_call(traces[0], 1, 1000, 4100);
  add_call(traces[1], 1, 2000 - behind, 4200 - behind);
  add_call(traces[2], 1, 4000 - behind, 4300 - behind);
  add_call(traces[0], 2, 9000, 9200);
  add_call(traces[1], 2, 5000 - behind, 9100 - behind);
  add_call(traces[2], 2, 8000 - behind, 9100 - behind);
  add_call(traces[0], 3, 10'000, 12'000);
  add_call(traces[2], 3, 11'000 - behind, 12'000 - behind);
  const auto file = read(traces, clocks);

  std::map<std::pair<int, double>, std::string> waits;
  for (const auto& event : file["traceEvents"])
    if (event["name"] == "wait for ranks")
      waits[{event["pid"], event["ts"]}] = event["args"].contains("for") ? event["args"]["for"].get<std::string>() +
                                                                               " " + event["args"]["after_ms"].dump()
                                                                         : "";
  EXPECT_EQ(waits, (std::map<std::pair<int, double>, std::string>{{{0, 0.0}, "rank 2 0.003"},
                                                                  {{1, 1.0}, "rank 2 0.002"},
                                                                  {{2, 3.0}, ""},
                                                                  {{0, 8.0}, ""},
                                                                  {{1, 4.0}, "rank 0 0.004"},
                                                                  {{2, 7.0}, "rank 0 0.001"},
                                                                  {{0, 9.0}, ""},
                                                                  {{2, 10.0}, ""}}));
  const auto& other = file["otherData"];
  EXPECT_EQ(other["waited_for"], Json::parse(R"([{"rank": 0, "ms": 0.005}, {"rank": 2, "ms": 0.005}])"));
  EXPECT_EQ(other["ranks"], 3);
  EXPECT_EQ(other["clock_error_ms"], 0.00005);
}

TEST(TraceFile, HasAnEventForEachAndTheirSums) {
  const Clocks clocks(0, 0);
  std::vector<Trace> traces(3);
  traces[0] = {.events = {{.name = "step", .begin_ns = 1000, .end_ns = 9000, .number = 4},
                          {.name = "a \"name\"\n", .thread = 1, .begin_ns = 2000, .end_ns = 2500}},
               .threads = {"main thread", "muster-progress"},
               .dropped = 3};
  traces[2] = {
      .events = {{.name = "step", .begin_ns = 1500, .end_ns = 9600, .number = 4},
                 {.name = "network", .track = TraceTrack::network, .begin_ns = 3000, .end_ns = 4000, .bytes = 1 << 20}},
      .threads = {"main thread"},
      .dropped = 4};
  const auto file = read(traces, clocks);
  std::map<std::string, int> counts;
  for (const auto& event : file["traceEvents"]) ++counts[event["ph"]];
  EXPECT_EQ(counts, (std::map<std::string, int>{{"X", 3}, {"b", 1}, {"e", 1}, {"M", 9}}));
  const auto find = [&](const std::string& name, const std::string& phase, int rank) {
    for (const auto& event : file["traceEvents"])
      if (event["name"] == name && event["ph"] == phase && event["pid"] == rank) return event;
    return Json();
  };
  EXPECT_EQ(find("step", "X", 2)["ts"], 0.5);
  EXPECT_EQ(find("step", "X", 2)["dur"], 8.1);
  EXPECT_EQ(find("step", "X", 2)["args"]["number"], 4);
  EXPECT_EQ(find("a \"name\"\n", "X", 0)["tid"], 1);
  EXPECT_EQ(find("network", "b", 2)["args"]["bytes"], 1 << 20);
  EXPECT_EQ(find("network", "e", 2)["ts"], 3.0);
  EXPECT_EQ(find("network", "e", 2)["id"], find("network", "b", 2)["id"]);
  const auto& other = file["otherData"];
  EXPECT_EQ(other["dropped_events"], 7);
  EXPECT_EQ(other["spans"].size(), 3U);
  for (const auto& span : other["spans"])
    if (span["name"] == "step") {
      EXPECT_EQ(span, Json::parse(R"({"name": "step", "count": 2, "total_ms": 0.0161, "longest_ms": 0.0081,
                                      "longest_rank": 2, "longest_at_ms": 0.0005})"));
    }
}

}  // namespace
}  // namespace muster::detail::trace_test
