// Slots that the ranks of a node fill for each other: two mappings of one segment stand for two ranks.
#include "node/shared_slots.hpp"
#include "unit/node_threads.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace muster::detail::node {
namespace {

using Arrays = std::vector<SlotArray>;

/// The slots of several ranks of a node.
struct Ranks {
  Ranks(int count, Arrays arrays) {
    const auto bytes = SharedSlots::memory_bytes(arrays);
    auto first = std::make_shared<SharedSegment>(SharedSegment::create(bytes));
    name = first->name();
    first->reserve(0, SharedSlots::reserved_bytes(arrays));
    for (int r = 0; r < count; ++r)
      slots.emplace_back(r == 0 ? first : std::make_shared<SharedSegment>(SharedSegment::open(name, bytes)), arrays);
    first->unlink();
  }

  std::string name;
  std::vector<SharedSlots> slots;
};

std::byte content_of(std::size_t array, std::size_t slot) { return static_cast<std::byte>(1 + 7 * array + slot); }

/// Fills a slot if nobody else does.
bool fill(const SharedSlots& slots, std::size_t array, std::size_t slot) {
  auto claim = slots.claim(array, slot);
  if (!claim || !claim->reserve()) return false;
  std::memset(claim->memory().data(), static_cast<int>(content_of(array, slot)), claim->memory().size());
  claim->finish();
  return true;
}

bool holds(const std::byte* found, const SlotArray& array, std::size_t g, std::size_t slot) {
  return found != nullptr &&
         std::all_of(found, found + array.bytes, [&](auto each) { return each == content_of(g, slot); });
}

TEST(SharedSlots, OfEverySizeAreFilledByOneRankAndReadByTheOthers) {
  const Arrays arrays{{3, 1}, {1, 100'000}, {0, 5}, {7, 4096}, {2, (2 << 20) + 3}, {70, 63}};
  const Ranks ranks(2, arrays);
  for (std::size_t g = 0; g < arrays.size(); ++g)
    for (std::size_t s = 0; s < arrays[g].count; ++s) {
      EXPECT_EQ(ranks.slots[0].find(g, s), nullptr);
      EXPECT_TRUE(fill(ranks.slots[(g + s) % 2], g, s));
    }
  for (std::size_t g = 0; g < arrays.size(); ++g)
    for (std::size_t s = 0; s < arrays[g].count; ++s)
      for (const auto& slots : ranks.slots) {
        EXPECT_TRUE(holds(slots.find(g, s), arrays[g], g, s)) << g << ' ' << s;
        EXPECT_FALSE(slots.claim(g, s)) << "it never changes again";
      }
}

TEST(SharedSlots, AClaimIsOfOneRankUntilItIsGivenBack) {
  const Ranks ranks(2, {{2, 1000}});
  try {
    const auto claim = ranks.slots[0].claim(0, 1);
    ASSERT_TRUE(claim && claim->reserve());
    std::memset(claim->memory().data(), 99, 500);
    EXPECT_FALSE(ranks.slots[1].claim(0, 1));
    EXPECT_FALSE(ranks.slots[0].claim(0, 1)) << "nor does another thread get it";
    EXPECT_EQ(ranks.slots[1].find(0, 1), nullptr);
    EXPECT_TRUE(fill(ranks.slots[1], 0, 0)) << "nobody waits";
    throw std::runtime_error("a damaged chunk");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(ranks.slots[1].find(0, 1), nullptr);
  EXPECT_TRUE(fill(ranks.slots[1], 0, 1));
  EXPECT_TRUE(holds(ranks.slots[0].find(0, 1), {2, 1000}, 0, 1));
}

TEST(SharedSlots, AreFilledOnceByManyThreads) {
  const Arrays arrays{{200, 300}, {200, 5}};
  for (int round = 0; round < 20; ++round) {
    const Ranks ranks(3, arrays);
    std::atomic<int> filled{0}, wrong{0}, started{0};
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < 6; ++t)
      threads.emplace_back([&, t] {
        ++started;
        test::wait_for([&] { return started == 6; });
        const auto& slots = ranks.slots[t % ranks.slots.size()];
        for (std::size_t i = 0; i < 400; ++i) {
          const auto g = i % 2, s = (i / 2 + 50 * t) % 200;
          if (fill(slots, g, s)) ++filled;
          if (const auto* found = slots.find(g, s); found != nullptr && !holds(found, arrays[g], g, s)) ++wrong;
        }
      });
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(filled, 400);
    EXPECT_EQ(wrong, 0);
  }
}

/// The exit status of a child of fork() that runs `body`, or the signal that ended it.
int status_of(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
}

TEST(SharedSlots, OfAKilledRankAreLostAndNoOthers) {
  const Arrays arrays{{3, 5000}};
  const auto bytes = SharedSlots::memory_bytes(arrays);
  const auto segment = std::make_shared<SharedSegment>(SharedSegment::create(bytes));
  segment->reserve(0, SharedSlots::reserved_bytes(arrays));
  const SharedSlots here(segment, arrays);
  EXPECT_EQ(status_of([&] {
              const SharedSlots there(std::make_shared<SharedSegment>(SharedSegment::open(segment->name(), bytes)),
                                      arrays);
              fill(there, 0, 0);
              const auto claim = there.claim(0, 1);
              if (!claim || !claim->reserve()) return 1;
              std::memset(claim->memory().data(), 99, 2000);
              return ::kill(::getpid(), SIGKILL);
            }),
            SIGKILL);
  segment->unlink();
  EXPECT_TRUE(holds(here.find(0, 0), arrays[0], 0, 0)) << "it was filled";
  EXPECT_EQ(here.find(0, 1), nullptr);
  EXPECT_FALSE(here.claim(0, 1)) << "whoever wants it has it to itself";
  EXPECT_TRUE(fill(here, 0, 2));
  EXPECT_FALSE(std::filesystem::exists("/dev/shm" + segment->name()));
}

TEST(SharedSlots, AreOnlyReadInAChildOfFork) {
  const Arrays arrays{{200, 300}};
  const Ranks ranks(2, arrays);
  ASSERT_TRUE(fill(ranks.slots[0], 0, 0));
  int to_child[2], to_parent[2];
  ASSERT_EQ(::pipe(to_child), 0);
  ASSERT_EQ(::pipe(to_parent), 0);
  char byte = 0;
  std::thread parent([&] {
    if (::read(to_parent[0], &byte, 1) != 1) return;
    for (std::size_t s = 1; s < 200; ++s) fill(ranks.slots[1], 0, s);
    static_cast<void>(::write(to_child[1], "x", 1) == 1);
  });
  EXPECT_EQ(status_of([&] {
              if (!holds(ranks.slots[0].find(0, 0), arrays[0], 0, 0)) return 1;
              for (std::size_t s = 1; s < 200; s += 2)
                if (fill(ranks.slots[0], 0, s) || ranks.slots[0].find(0, s) != nullptr) return 2;
              // What others fill meanwhile is whole, or not there: slots share pages.
              if (::write(to_parent[1], "x", 1) != 1 || ::read(to_child[0], &byte, 1) != 1) return 3;
              for (std::size_t s = 0; s < 200; ++s)
                if (const auto* found = ranks.slots[0].find(0, s); found != nullptr && !holds(found, arrays[0], 0, s))
                  return 4;
              return 0;
            }),
            0);
  parent.join();
  for (const int end : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) ::close(end);
  for (std::size_t s = 0; s < 200; ++s) EXPECT_TRUE(holds(ranks.slots[0].find(0, s), arrays[0], 0, s));
}

TEST(SharedSlots, LeaveAPartOfTheMemoryToGradients) {
  const auto all = std::filesystem::space("/dev/shm");
  EXPECT_LE(spare_shared_memory(), all.available);
  EXPECT_LE(spare_shared_memory(), all.capacity - all.capacity / 4);
}

}  // namespace
}  // namespace muster::detail::node
