// The parts of a chunked column: its layout, its cache and its memory.
#include "data/sources/chunk_cache.hpp"
#include "data/sources/chunk_layout.hpp"
#include "data/sources/chunk_memory.hpp"
#include "data/sources/scattered_read.hpp"
#include "muster/error.hpp"
#include "support/folder.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace muster::detail::data {
namespace {

struct RowRun {
  bool operator==(const RowRun&) const = default;

  std::size_t in_chunk, in_row, bytes;
};

std::vector<RowRun> runs_of(const ChunkLayout& layout, std::int64_t number) {
  std::vector<RowRun> runs;
  layout.each_run(layout.part(number), [&](std::size_t in_chunk, std::size_t in_row, std::size_t bytes) {
    runs.push_back({in_chunk, in_row, bytes});
  });
  return runs;
}

TEST(ChunkLayout, PutsEveryValueOfARowInOnePlace) {
  std::mt19937 random(1);
  const auto upto = [&](int most) { return static_cast<std::int64_t>(1 + random() % static_cast<unsigned>(most)); };
  for (int round = 0; round < 500; ++round) {
    std::vector<std::int64_t> shape, chunk;
    for (auto rank = upto(4); rank > 0; --rank) {
      shape.push_back(upto(7));
      chunk.push_back(upto(9));
    }
    const auto value = upto(8);
    const ChunkLayout layout(shape, chunk, value);
    const auto row_bytes =
        static_cast<std::size_t>(std::accumulate(shape.begin() + 1, shape.end(), value, std::multiplies<>()));
    std::vector<int> covered(row_bytes, 0);
    for (std::int64_t number = 0; number < layout.chunks_per_row(); ++number) {
      const auto runs = runs_of(layout, number);
      for (const std::size_t least : {1, 2, 5, 100})
        EXPECT_EQ(layout.has_runs_of(least, layout.part(number)), runs.size() == 1 || runs.front().bytes >= least);
      std::size_t end = 0;
      for (const auto& run : runs) {
        EXPECT_EQ(run.bytes, runs.front().bytes);
        EXPECT_GE(run.in_chunk, end);
        end = run.in_chunk + run.bytes;
        EXPECT_LE(end, layout.row_bytes_in_chunk());
        ASSERT_LE(run.in_row + run.bytes, row_bytes);
        for (std::size_t i = 0; i < run.bytes; ++i) ++covered[run.in_row + i];
      }
      EXPECT_EQ(runs, runs_of(layout, number + layout.chunks_per_row()));
    }
    EXPECT_EQ(covered, std::vector<int>(row_bytes, 1));
  }
}

TEST(ChunkLayout, ARowInOneChunkIsOneRun) {
  EXPECT_EQ(runs_of(ChunkLayout({10}, {4}, 8), 1), (std::vector<RowRun>{{0, 0, 8}}));
  EXPECT_EQ(runs_of(ChunkLayout({10, 3, 5}, {4, 3, 5}, 4), 0), (std::vector<RowRun>{{0, 0, 60}}));
  EXPECT_EQ(runs_of(ChunkLayout({10, 3, 5}, {1, 2, 5}, 4), 1), (std::vector<RowRun>{{0, 40, 20}}));
  EXPECT_EQ(runs_of(ChunkLayout({10, 2, 5}, {1, 2, 3}, 4), 1), (std::vector<RowRun>{{0, 12, 8}, {12, 32, 8}}));
}

TEST(ChunkCache, KeepsWhatWasUsedLast) {
  ChunkCache cache(100);
  const int column = 0, other = 0;
  const auto chunk = [&] { return cache.new_chunk(1); };
  EXPECT_TRUE(cache.fits(100));
  EXPECT_FALSE(cache.fits(101));
  const auto first = chunk();
  cache.keep({&column, 1}, first, 40, 9, 1);
  cache.keep({&column, 2}, chunk(), 40, 9, 1);
  EXPECT_EQ(cache.find({&column, 1}, 1), first);
  EXPECT_EQ(cache.find({&other, 1}, 1), nullptr);
  cache.keep({&other, 1}, chunk(), 30, 9, 1);
  EXPECT_EQ(cache.find({&column, 2}, 1), nullptr) << "the one used least recently goes";
  EXPECT_NE(cache.find({&column, 1}, 1), nullptr);
  cache.keep({&column, 1}, chunk(), 40, 9, 1);
  EXPECT_EQ(cache.find({&column, 1}, 1), first) << "of two threads, the first one's is kept";
  cache.keep({&column, 3}, chunk(), 100, 9, 1);
  EXPECT_EQ(cache.find({&column, 1}, 1), nullptr);
  EXPECT_NE(cache.find({&column, 3}, 1), nullptr);
}

TEST(ChunkCache, DropsAChunkFirstIfAllItsRowsWereTaken) {
  ChunkCache cache(100);
  const int column = 0;
  const auto keep = [&](std::int64_t number, std::int64_t taken) {
    cache.keep({&column, number}, cache.new_chunk(1), 25, 4, taken);
  };
  const auto has = [&](std::int64_t number) { return cache.find({&column, number}, 0) != nullptr; };
  keep(1, 0);
  for (const std::int64_t number : {2, 3, 4}) keep(number, 1);
  for (const std::int64_t rows : {1, 2}) EXPECT_NE(cache.find({&column, 4}, rows), nullptr);
  keep(5, 3);
  EXPECT_FALSE(has(4)) << "its four rows were taken";
  EXPECT_TRUE(has(1)) << "the one used least recently, of which no row was taken";
  EXPECT_NE(cache.find({&column, 5}, 1), nullptr);
  EXPECT_NE(cache.find({&column, 5}, 1), nullptr) << "it is there until its place is needed, and a new pass begins";
  keep(6, 4);
  EXPECT_TRUE(has(5));
  EXPECT_FALSE(has(2));
  keep(7, 0);
  EXPECT_FALSE(has(6));
}

TEST(ChunkCache, DropsAChunkOnDemandIfAllItsRowsWereTaken) {
  ChunkCache cache(100);
  const int column = 0;
  cache.keep({&column, 1}, cache.new_chunk(1), 60, 4, 3);
  EXPECT_FALSE(cache.has_room(60));
  cache.drop_taken({&column, 1});
  EXPECT_NE(cache.find({&column, 1}, 1), nullptr) << "a row was left";
  cache.drop_taken({&column, 1});
  EXPECT_EQ(cache.find({&column, 1}, 0), nullptr);
  EXPECT_TRUE(cache.has_room(60));
  cache.drop_taken({&column, 1});
}

TEST(ChunkCache, SharesItsLimit) {
  ChunkCache cache(100);
  cache.lower_limit(60);
  EXPECT_TRUE(cache.fits(40));
  EXPECT_FALSE(cache.fits(41));
  cache.lower_limit(41);
  EXPECT_FALSE(cache.fits(1));
  EXPECT_FALSE(ChunkCache(-1).fits(1));
}

TEST(ChunkMemory, GivesTheMemoryOfDroppedChunksToNewOnes) {
  constexpr std::size_t size = 1 << 20;
  ChunkMemory memory;
  std::set<const std::byte*> places;
  std::deque<ChunkMemory::Chunk> chunks;
  for (int i = 0; i < 100; ++i) {
    if (chunks.size() == 4) chunks.pop_front();
    places.insert(chunks.emplace_back(memory.take(size)).get());
  }
  EXPECT_LE(places.size(), 4U);
}

TEST(ChunkMemory, ChunksNeverOverlapAndOutliveIt) {
  std::mt19937 random(1);
  std::vector<std::pair<ChunkMemory::Chunk, std::size_t>> used;
  const auto expect_marked = [&](std::size_t i) {
    const auto& [chunk, bytes] = used[i];
    EXPECT_EQ(std::count(chunk.get(), chunk.get() + bytes, chunk.get()[0]), static_cast<std::ptrdiff_t>(bytes));
  };
  {
    ChunkMemory memory;
    for (int i = 0; i < 3000; ++i) {
      if (random() % 5 > 1 || used.empty()) {
        constexpr std::size_t sizes[] = {1, 64, 1000, 70'000, 1 << 20, 5 << 20};
        const auto bytes = sizes[std::min({random() % 6, random() % 6, random() % 6})];
        used.emplace_back(memory.take(bytes), bytes);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(used.back().first.get()) % 64, 0U);
        std::fill_n(used.back().first.get(), bytes, static_cast<std::byte>(i));
      } else {
        std::swap(used[random() % used.size()], used.back());
        expect_marked(used.size() - 1);
        used.pop_back();
      }
    }
  }
  for (std::size_t i = 0; i < used.size(); ++i) expect_marked(i);
}

TEST(ChunkMemory, IsTakenAndGivenBackByThreads) {
  ChunkMemory memory;
  std::atomic<int> wrong = 0;
  const auto work = [&](int mark) {
    std::deque<ChunkMemory::Chunk> chunks;
    for (int i = 0; i < 2000; ++i) {
      *chunks.emplace_back(memory.take(100'000)) = static_cast<std::byte>(mark);
      if (chunks.size() < static_cast<std::size_t>(i % 7)) continue;
      wrong += *chunks.front() != static_cast<std::byte>(mark);
      chunks.pop_front();
    }
  };
  std::vector<std::jthread> threads;
  for (int mark = 0; mark < 4; ++mark) threads.emplace_back(work, mark);
  threads.clear();
  EXPECT_EQ(wrong, 0);
}

TEST(ScatteredRead, ReadsPiecesInAnyOrder) {
  const test::Folder folder;
  std::string content(100000, '\0');
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>(i * 7 + i / 251);
  write_file(folder / "a", content);
  const File file(folder / "a", File::Mode::read);
  const std::string shown = "a";
  std::mt19937 random(2);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::byte> memory(200000);
    std::vector<std::array<std::size_t, 3>> pieces;  // offset, place, bytes
    std::size_t offset = 0, place = 0;
    ScatteredRead read(file, shown);
    for (auto count = random() % 3000; count > 0; --count) {
      const auto bytes = 1 + random() % 60;
      if (random() % 3 == 0) offset += random() % 2000;
      if (offset + bytes > content.size() || random() % 50 == 0) offset = random() % 90000;
      if (random() % 2 == 0) place += random() % 5;
      read.add(offset, memory.data() + place, bytes);
      pieces.push_back({offset, place, bytes});
      offset += bytes;
      place += bytes;
    }
    read.finish();
    for (const auto& [from, to, bytes] : pieces)
      EXPECT_EQ(std::memcmp(memory.data() + to, content.data() + from, bytes), 0);
  }
}

}  // namespace
}  // namespace muster::detail::data
