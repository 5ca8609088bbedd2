#include "data/passes/batches.hpp"
#include "base/log.hpp"
#include "base/memory_limit.hpp"
#include "data/passes/pass_positions.hpp"
#include "data/passes/shard.hpp"
#include "data/sources/direct_reads.hpp"
#include "data/sources/fingerprint.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"
#include "muster/preprocessor.hpp"
#include "support/failing_memory.hpp"
#include "support/hdf5_fixture.hpp"
#include "support/io_errors.hpp"
#include "unit/pass_world.hpp"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>

namespace muster::detail::data::batches_test {
namespace {

using namespace pass_world;
using test::Folder, test::H5File;

TEST(Batches, OfOneRankInOrder) {
  for (const int ahead : {0, 1, 3}) {
    const World world(10, 1);
    Samples samples;
    std::vector<std::int64_t> sizes;
    for (auto& batch : world.shard().iter_torch_batches({.batch_size = 4, .prefetch_batches = ahead})) {
      append(samples, batch);
      sizes.push_back(batch.size());
      EXPECT_EQ(batch["x"].size(0), batch.size());
      EXPECT_EQ(batch["x"][0][1].item<int>(), 2 * batch["y"][0].item<int>() + 1);
    }
    EXPECT_EQ(samples, indices(10));
    EXPECT_EQ(sizes, (std::vector<std::int64_t>{4, 4, 2}));
  }
}

TEST(Batches, OfChunksBeyondTheCacheComeOnceAndResumeAtAnyNumberOfRanks) {
  const Folder folder;
  constexpr std::int64_t samples = 1000;
  H5File(folder.file("a.h5")).columns(samples - 100, 0, {.chunk = 16, .deflate = 1});
  H5File(folder.file("b.h5")).columns(100, samples - 100, {.chunk = 16, .deflate = 1});
  const auto data = Dataset::from_hdf5({folder.file("a.h5"), folder.file("b.h5")}, {.cache_bytes = 4000});
  const BatchOptions options{.global_batch_size = 48, .shuffle = true};
  const auto whole = run(World(data, 1, true, 3), options);
  EXPECT_EQ(sorted(whole), indices(samples));
  EXPECT_NE(whole, run(World(data, 1, true, 4), options));
  EXPECT_EQ(sorted(run(World(data, 5, true, 3), options)), indices(samples));
  Json position;
  auto seen = run(World(data, 3, true, 3), options, 7, &position);
  EXPECT_EQ(sorted(seen), sorted({whole.begin(), whole.begin() + 7 * 48}));
  const World later(data, 4, true, 99);
  for (const auto& state : later.states) state->restore(position);
  const auto rest = run(later, options);
  seen.insert(seen.end(), rest.begin(), rest.end());
  EXPECT_EQ(sorted(seen), indices(samples));
  // The files may be joined meanwhile: the rest of the pass comes in the order in which it began.
  H5File(folder.file("ab.h5")).columns(samples, 0, {.chunk = 32});
  const World joined(Dataset::from_hdf5({folder.file("ab.h5")}, {.cache_bytes = 4000}), 1, true, 99);
  joined.states[0]->restore(position);
  EXPECT_EQ(run(joined, options), Samples(whole.begin() + 7 * 48, whole.end()));
  for (const auto& damaged :
       {Json{{"rows", 16}, {"lanes", 0}, {"files", {1000}}}, Json{{"rows", -1}, {"lanes", 64}, {"files", {1000}}},
        Json{{"rows", 16}, {"lanes", 64}, {"files", {900, 101}}},
        Json{{"rows", 16}, {"lanes", 64}, {"files", {2000, -1000}}}, Json("16")}) {
    auto wrong = position;
    wrong["blocks"] = damaged;
    EXPECT_THROW(World(data, 1).states[0]->restore(wrong), Error) << damaged;
  }
  // With a larger cache the rest of the pass still comes in the order in which it began; the next pass is a full
  // shuffle.
  const World larger(Dataset::from_hdf5({folder.file("a.h5"), folder.file("b.h5")}), 1, true, 99);
  larger.states[0]->restore(position);
  EXPECT_EQ(run(larger, options), Samples(whole.begin() + 7 * 48, whole.end()));
  EXPECT_EQ(sorted(run(larger, options)), indices(samples));
}

constexpr H5Z_filter_t counting_filter = 300;
std::atomic<int> chunks_decoded = 0;

/// Changes nothing, and counts the chunks that are read.
std::size_t count_chunk(unsigned flags, std::size_t, const unsigned*, std::size_t bytes, std::size_t*, void**) {
  if ((flags & H5Z_FLAG_REVERSE) != 0) ++chunks_decoded;
  return bytes;
}

TEST(Batches, OfChunksBeyondTheCacheDecodeEachChunkOnce) {
  const H5Z_class2_t filter{H5Z_CLASS_T_VERS, counting_filter, 1, 1, "counting", nullptr, nullptr, count_chunk};
  {
    const hdf5::Lock lock;
    ASSERT_GE(H5Zregister(&filter), 0);
  }
  const Folder folder;
  constexpr int rows = 10'000, chunk_rows = 10, chunks = rows / chunk_rows;
  constexpr std::int64_t chunk_bytes = chunk_rows * 12 + chunk_rows * 8;
  H5File(folder.file("a.h5")).columns(rows, 0, {.chunk = chunk_rows, .filter = counting_filter});
  for (const int world : {1, 2, 8})
    for (const std::int64_t batch : {64, 128, 32}) {
      const World ranks(Dataset::from_hdf5({folder.file("a.h5")}, {.cache_bytes = 128 * chunk_bytes}), world, true, 5);
      chunks_decoded = 0;
      EXPECT_EQ(sorted(run(ranks, {.global_batch_size = batch, .shuffle = true})), indices(rows));
      EXPECT_EQ(chunks_decoded, 2 * chunks) << world << " ranks, batch " << batch << ": x and y";
    }
  // Three values of a row in chunks of two: half of the second chunk is padding, which takes memory, too.
  H5File(folder.file("b.h5")).columns(rows, 0, {.chunk = chunk_rows, .filter = counting_filter, .inner_chunk = 2});
  const World padded(Dataset::from_hdf5({folder.file("b.h5")}, {.cache_bytes = 128 * (chunk_bytes + chunk_rows * 4)}),
                     1);
  chunks_decoded = 0;
  EXPECT_EQ(sorted(run(padded, {.global_batch_size = 64, .shuffle = true})), indices(rows));
  EXPECT_EQ(chunks_decoded, 3 * chunks);
}

TEST(Batches, OfChunksBeyondTheCacheReadEachChunkOnce) {
  const Folder folder;
  constexpr int rows = 10'000, chunk_rows = 10, chunks = rows / chunk_rows;
  constexpr std::int64_t chunk_bytes = chunk_rows * 12 + chunk_rows * 8;
  H5File(folder.file("a.h5")).columns(rows, 0, {.chunk = chunk_rows, .deflate = 1});
  for (const int world : {1, 2, 8})
    for (const std::int64_t batch : {64, 128, 32}) {
      const World ranks(Dataset::from_hdf5({folder.file("a.h5")}, {.cache_bytes = 128 * chunk_bytes}), world, true, 5);
      ranks.shard().iter_torch_batches({.batch_size = 1}).num_batches();  // opens the file
      const test::IoError reads("preadv", "a.h5", 0);
      EXPECT_EQ(sorted(run(ranks, {.global_batch_size = batch, .shuffle = true})), indices(rows));
      EXPECT_EQ(reads.count(), 2 * chunks) << world << " ranks, batch " << batch << ": x and y";
    }
}

/// As of files that are larger than memory.
class SmallMemory {
 public:
  SmallMemory() { set_memory_limit(1); }
  SmallMemory(const SmallMemory&) = delete;
  ~SmallMemory() { set_memory_limit(0); }
};

/// Waits until no thread that reads data is left; the kernel shows one for a moment after it was joined.
void wait_for_threads_to_end() {
  const std::set<std::string> names{"muster-read", "muster-map", "muster-ahead", "muster-decode", "muster-disk"};
  const auto is_of_pass = [&](const std::filesystem::directory_entry& thread) {
    std::string name;
    std::ifstream(thread.path() / "comm") >> name;
    return names.contains(name);
  };
  while (std::ranges::any_of(std::filesystem::directory_iterator("/proc/self/task"), is_of_pass))
    std::this_thread::yield();
}

TEST(Batches, OfFilesBeyondMemoryAreTheSame) {
  const Folder folder;
  constexpr int rows = 1200, chunk_rows = 4, values = 5000;
  constexpr std::int64_t chunk_bytes = chunk_rows * values * 4;
  // Random values, so that chunks of x take more than DirectReads::least_bytes; those of y take less.
  std::mt19937 random(7);
  for (const int file : {0, 1}) {
    std::vector<float> x(rows / 2 * values);
    for (auto& value : x) value = static_cast<float>(random());
    std::vector<std::int64_t> y(rows / 2);
    std::iota(y.begin(), y.end(), file * rows / 2);
    for (std::size_t row = 0; row < y.size(); ++row) x[row * values] = static_cast<float>(y[row]);
    H5File h5(folder.file(file == 0 ? "a.h5" : "b.h5"));
    const test::Layout layout{.chunk = chunk_rows, .deflate = 1};
    h5.dataset("x", {rows / 2, values}, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, x.data(), layout);
    h5.dataset("y", {rows / 2}, H5T_STD_I64LE, H5T_NATIVE_INT64, y.data(), layout);
  }
  const auto data = [&] {
    return Dataset::from_hdf5({folder.file("a.h5"), folder.file("b.h5")}, {.cache_bytes = 140 * chunk_bytes});
  };
  const auto samples_of = [](const World& world, const BatchOptions& options) {
    Samples samples;
    for (std::size_t rank = 0; rank < world.states.size(); ++rank)
      for (const auto& batch : world.shard(rank).iter_torch_batches(options)) {
        EXPECT_TRUE(at::equal(batch["x"].select(1, 0).to(at::kLong), batch["y"]));
        append(samples, batch);
      }
    return samples;
  };
  const File file(folder.file("b.h5"), File::Mode::read);
  const bool has_direct_io = DirectReads(1 << 20).request(file, 0, 1);
  for (const int world : {1, 3})
    for (const std::int64_t batch : {16, 100}) {
      const BatchOptions options{.global_batch_size = batch, .shuffle = true};
      const auto expected = samples_of(World(data(), world, true, 5), options);
      EXPECT_EQ(sorted(expected), indices(rows));
      const SmallMemory small;
      const auto opened = data();
      ASSERT_EQ(source_of(opened)->count(), rows);
      for (const int error : {0, EIO, EINVAL}) {
        // Also after a pass that was left early, with chunks on their way.
        int taken = 0;
        const World early(opened, 1, true, 6);
        for (const auto& left : early.shard().iter_torch_batches({.batch_size = 16, .shuffle = true})) {
          EXPECT_GT(left.size(), 0);
          if (++taken == 25) break;
        }
        const test::IoError reads("pread", "b.h5", error);
        EXPECT_EQ(samples_of(World(opened, world, true, 5), options), expected)
            << world << " ranks, batch " << batch << ", error " << error;
        // Of x, but not those of the first batches, those that are kept, or, after EINVAL, more.
        if (error == 0 && has_direct_io) {
          EXPECT_GT(reads.count(), 0);
        }
        EXPECT_LE(reads.count(), error == EINVAL ? 8 : rows / 2 / chunk_rows);
        wait_for_threads_to_end();
      }
    }
}

TEST(Batches, OfChunksBeyondTheCacheDecodeAFewChunksInEachStep) {
  const Folder folder;
  constexpr int rows = 10'000, chunk_rows = 10;
  H5File(folder.file("a.h5")).columns(rows, 0, {.chunk = chunk_rows, .deflate = 1});
  const World world(Dataset::from_hdf5({folder.file("a.h5")}, {.cache_bytes = 128 * chunk_rows * 20}), 1, true, 5);
  std::vector<int> reads_of_step;
  int before = 0;
  const test::IoError reads("preadv", "a.h5", 0);
  for (const auto& batch :
       world.shard().iter_torch_batches({.batch_size = 64, .shuffle = true, .prefetch_batches = 0})) {
    EXPECT_GT(batch.size(), 0);
    reads_of_step.push_back(reads.count() - std::exchange(before, reads.count()));
  }
  EXPECT_GE(reads_of_step.front(), 2 * 64) << "one of x and one of y for each lane";
  // Each lane reads the next chunk of x and of y once in ten steps.
  EXPECT_LE(*std::max_element(reads_of_step.begin() + 1, reads_of_step.end()), 2 * 8);
}

TEST(Batches, OfChunksWithoutFiltersAreReadRowByRow) {
  const Folder folder;
  H5File(folder.file("a.h5")).columns(1000, 0, {.chunk = 10});
  const auto data = Dataset::from_hdf5({folder.file("a.h5")}, {.cache_bytes = 100});
  EXPECT_EQ(source_of(data)->blocks().rows, 0);
  EXPECT_EQ(sorted(run(World(data, 3), {.global_batch_size = 48, .shuffle = true})), indices(1000));
}

TEST(Batches, RanksMustAgreeOnTheLanes) {
  const Folder folder;
  H5File(folder.file("a.h5")).columns(1000, 0, {.chunk = 10, .deflate = 1});
  const auto print = [&](std::int64_t cache) {
    return source_of(Dataset::from_hdf5({folder.file("a.h5")}, {.cache_bytes = cache}))->fingerprint();
  };
  const auto copy = DatasetFingerprint::from_json(print(4000).to_json());
  EXPECT_FALSE(difference(print(4000), "rank 0", copy, "rank 1"));
  EXPECT_EQ(difference(print(4000), "rank 0", print(1 << 20), "rank 1"),
            "it is shuffled in 10 lanes of chunks of 10 samples on rank 0 and in any order on rank 1");
}

TEST(Batches, ReferencesStayGoodWhenColumnsAreAdded) {
  Batch batch({{"x", at::ones({3})}});
  auto& x = batch["x"];
  for (int i = 0; i < 100; ++i) batch.set("column " + std::to_string(i), at::zeros({3}));
  x = at::full({3}, 2.0);
  EXPECT_EQ(batch["x"][0].item<double>(), 2);
}

TEST(Batches, MayBeReplacedByTheProgram) {
  for (const bool replaced : {false, true}) {
    const World world(10, 1);
    int boundaries = 0;
    world.pass_positions.front()->stop_if_asked = [&] { ++boundaries; };
    std::int64_t taken = 0;
    for (auto& batch : world.shard().iter_torch_batches({.batch_size = 4})) {
      taken += batch.size();
      if (replaced) batch = Batch({{"other", at::arange(3)}});
      EXPECT_EQ(world.states.front()->position().at("consumed"), taken);
    }
    EXPECT_EQ(boundaries, 3) << "a run that is asked to stop stops there";
  }
}

TEST(Batches, EverySampleOnceAtAnyWorld) {
  for (const std::int64_t size : {1, 3, 10, 11})
    for (int ranks = 1; ranks <= 4; ++ranks)
      for (const std::int64_t batch : {1, 2, 5})
        for (const bool shuffle : {false, true}) {
          const World world(size, ranks);
          EXPECT_EQ(sorted(run(world, {.batch_size = batch, .shuffle = shuffle})), indices(size));
          EXPECT_EQ(sorted(run(world, {.global_batch_size = batch, .shuffle = shuffle})), indices(size));
          EXPECT_EQ(sorted(run(world, {.batch_size = batch, .local_shuffle_buffer_size = 2})), indices(size));
        }
  const World world(10, 2);
  EXPECT_EQ(sorted(run(world, {.batch_size = std::numeric_limits<std::int64_t>::max()})), indices(10));
  EXPECT_EQ(run(world, {.batch_size = std::numeric_limits<std::int64_t>::max(), .drop_last = true}), Samples{});
  EXPECT_EQ(run(world, {.batch_size = 3, .drop_last = true}).size(), 6u);
}

TEST(Batches, OfTheSizeThatWasAskedFor) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    const World world(600, ranks);
    const auto sizes = [&](const BatchOptions& options) {
      Samples sizes;
      for (const auto& batch : world.shard().iter_batches(options)) sizes.push_back(batch.global_size());
      return sizes;
    };
    EXPECT_EQ(sizes({}).front(), std::min(600, 256 * ranks)) << "on each worker, unless said";
    EXPECT_EQ(sizes({.batch_size = 4}).front(), 4 * ranks);
    EXPECT_EQ(sizes({.global_batch_size = 250}), (Samples{250, 250, 100})) << "at any number of workers";
    EXPECT_EQ(sizes({.global_batch_size = 250, .drop_last = true}), (Samples{250, 250}));
  }
}

TEST(Batches, ARankLeftEmptyGetsPadding) {
  const World world(5, 4);
  std::vector<std::int64_t> sizes, weights;
  for (std::size_t rank = 0; rank < 4; ++rank) {
    auto range = world.shard(rank).iter_torch_batches({.batch_size = 1});
    EXPECT_EQ(range.num_batches(), 2);
    for (const auto& batch : range) {
      if (batch.global_size() == 4) continue;
      sizes.push_back(batch.size());
      EXPECT_EQ(batch.global_size(), 1);
      EXPECT_EQ(batch["y"].size(0), 1);
      EXPECT_EQ(batch["y"][0].item<int>(), 4);
      EXPECT_EQ(world.weight(rank).global, 1);
      EXPECT_EQ(batch.weight(), rank == 0 ? 4 : 0);
      weights.push_back(world.weight(rank).local);
    }
    EXPECT_EQ(world.weight(rank).global, 0) << "no weight after the pass";
  }
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{1, 0, 0, 0}));
  EXPECT_EQ(weights, sizes);
}

TEST(Batches, AWholeDatasetIsWholeOnEachRank) {
  const World world(10, 3, false);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    const auto& state = world.states[rank];
    for (const auto& batch : DatasetShard(state).iter_torch_batches({.batch_size = 4})) {
      EXPECT_EQ(batch.global_size(), batch.size());
      EXPECT_EQ(batch.weight(), 1.0);
      EXPECT_EQ(world.weight(rank).global, 0);
      EXPECT_FALSE(state->unfinished());
    }
    EXPECT_EQ(samples_in(DatasetShard(state).iter_batches({.batch_size = 4})), indices(10));
    EXPECT_EQ(DatasetShard(state).iter_batches({.global_batch_size = 10}).num_batches(), 3) << "4 to each worker";
    EXPECT_TRUE(state->position().is_null());
    state->restore(nullptr);
  }
}

TEST(Batches, OrdersDifferByEpochPassAndSeed) {
  std::set<Samples> orders;
  for (const std::uint64_t seed : {0, 1}) {
    const World world(20, 1, true, seed);
    for (const int epoch : {0, 1}) {
      world.shard().set_epoch(epoch);
      for (int pass = 0; pass < 2; ++pass) orders.insert(samples_in(world.shard().iter_batches({.shuffle = true})));
    }
  }
  EXPECT_EQ(orders.size(), 8u);
  const World one(20, 1), other(20, 1);
  const auto local = [](const World& world, std::uint64_t seed) {
    return samples_in(world.shard().iter_batches({.local_shuffle_buffer_size = 20, .local_shuffle_seed = seed}));
  };
  EXPECT_EQ(local(one, 3), local(other, 3));
  EXPECT_NE(local(World(20, 1), 3), local(World(20, 1), 4));
}

TEST(Batches, LocalShuffleStaysInItsWindow) {
  const World world(40, 2);
  const auto samples = samples_in(world.shard().iter_batches({.batch_size = 5, .local_shuffle_buffer_size = 5}));
  for (std::size_t i = 0; i < samples.size(); ++i)
    EXPECT_EQ(samples[i] / 10, static_cast<std::int64_t>(i / 5)) << "a step of 2 × 5 is a window";
}

TEST(Batches, ConvertsAsAsked) {
  const World world(4, 1);
  for (const auto& batch : world.shard().iter_torch_batches({.dtypes = {{"x", at::kFloat}}})) {
    EXPECT_EQ(batch["x"].scalar_type(), at::kFloat);
    EXPECT_EQ(batch["y"].scalar_type(), at::kLong);
    EXPECT_EQ(batch["x"][3][1].item<float>(), 7);
  }
  for (const auto& batch : world.shard().iter_torch_batches({.device = at::kMeta})) EXPECT_TRUE(batch["x"].is_meta());
  for (const auto& batch : world.shard().iter_torch_batches({.dtypes = at::kFloat})) {
    EXPECT_EQ(batch["x"].scalar_type(), at::kFloat);
    EXPECT_EQ(batch["y"].scalar_type(), at::kFloat) << "one type is for all columns";
  }
  for (const auto& batch : world.shard().iter_batches()) {
    EXPECT_EQ(batch["x"].scalar_type(), at::kInt);
    EXPECT_TRUE(batch["x"].is_cpu());
  }
  for (const auto& batch : world.shard().iter_batches({.dtypes = {{"x", at::kFloat}}, .device = at::kMeta})) {
    EXPECT_EQ(batch["x"].scalar_type(), at::kFloat);
    EXPECT_TRUE(batch["x"].is_meta());
  }
}

TEST(Batches, RefusesBadOptions) {
  const World world(4, 1);
  const auto refuse = [&](const BatchOptions& options, ExitCode code, const std::string& part) {
    try {
      world.shard().iter_torch_batches(options);
      ADD_FAILURE() << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refuse({.batch_size = 0}, ExitCode::usage, "batch_size");
  refuse({.global_batch_size = 0}, ExitCode::usage, "global_batch_size");
  refuse({.prefetch_batches = -1}, ExitCode::usage, "prefetch_batches");
  refuse({.local_shuffle_buffer_size = 0}, ExitCode::usage, "local_shuffle_buffer_size");
  refuse({.local_shuffle_seed = 3}, ExitCode::usage, "local_shuffle_seed");
  refuse({.dtypes = {{"z", at::kFloat}}}, ExitCode::data, "x, y");
  EXPECT_FALSE(world.states[0]->unfinished()) << "what was refused has not begun";
  auto range = world.shard().iter_batches();
  range.begin();
  EXPECT_THROW(range.begin(), Error) << "a single pass";
}

// A report in mid-epoch, then a restart with another number of ranks: no sample is lost, none comes twice.
TEST(Position, GoesOnAtAnotherWorld) {
  for (const std::int64_t size : {7, 12})
    for (int ranks = 1; ranks <= 4; ++ranks)
      for (int later_ranks = 1; later_ranks <= 4; ++later_ranks)
        for (std::int64_t stop = 1; stop <= 4; ++stop)
          for (const std::optional<std::int64_t> buffer : {std::optional<std::int64_t>{}, {3}}) {
            const BatchOptions options{.global_batch_size = 4, .shuffle = !buffer, .local_shuffle_buffer_size = buffer};
            Json position;
            auto samples = run(World(size, ranks), options, stop, &position);
            const World later(size, later_ranks, true, /*seed=*/later_ranks == 1 ? 99 : 0);
            for (const auto& state : later.states) state->restore(Json::parse(position.dump()));
            const auto rest = run(later, options);
            samples.insert(samples.end(), rest.begin(), rest.end());
            ASSERT_EQ(sorted(samples), indices(size)) << ranks << " " << later_ranks << " " << stop;
          }
}

TEST(Position, AnotherSeedIsForTheNextPass) {
  const auto two_passes = [](const World& world, const BatchOptions& options) {
    const auto first = samples_in(world.shard().iter_batches(options));
    return std::pair(first, samples_in(world.shard().iter_batches(options)));
  };
  for (const auto& options : {BatchOptions{.batch_size = 3, .shuffle = true},
                              BatchOptions{.batch_size = 3, .local_shuffle_buffer_size = 6}}) {
    const auto of_5 = two_passes(World(20, 1, true, 5), options), of_6 = two_passes(World(20, 1, true, 6), options);
    ASSERT_NE(of_5.second, of_6.second);
    Samples samples;
    const auto begin = [&](const World& world) {
      auto range = world.shard().iter_batches(options);
      append(samples, *range.begin());
      return world.states[0]->position();
    };
    const auto later = [&](const Json& position) {
      World world(20, 1, true, 6);
      world.states[0]->restore(position);
      return world;
    };
    const auto first = begin(World(20, 1, true, 5));
    const auto second = begin(later(first));  // stopped once more in the same pass
    testing::internal::CaptureStderr();
    const auto [rest, next] = two_passes(later(second), options);
    detail::log::flush();
    EXPECT_NE(testing::internal::GetCapturedStderr().find("--seed differs from its value when the run was saved"),
              std::string::npos);
    samples.insert(samples.end(), rest.begin(), rest.end());
    EXPECT_EQ(samples, of_5.first) << "the rest of the pass keeps the old seed";
    EXPECT_EQ(next, of_6.second);
    auto old = first;
    old.erase("pass_seed");  // as earlier versions saved it
    EXPECT_EQ(two_passes(later(old), options).second, of_6.second);
  }
}

TEST(Position, FinishedPassesComeBackEmpty) {
  const World world(10, 1);
  const BatchOptions options{.batch_size = 3, .shuffle = true};
  world.shard().set_epoch(4);
  samples_in(world.shard().iter_batches(options));
  samples_in(world.shard().iter_batches(options));
  const auto undisturbed = [&] {
    const World other(10, 1);
    other.shard().set_epoch(4);
    for (int pass = 0; pass < 2; ++pass) samples_in(other.shard().iter_batches(options));
    return samples_in(other.shard().iter_batches(options));
  }();
  Samples samples;
  Json position;
  {
    auto range = world.shard().iter_batches(options);
    auto batch = range.begin();
    append(samples, *batch);
    position = world.states[0]->position();
  }
  const World later(10, 1);
  auto& state = *later.states[0];
  state.restore(position);
  EXPECT_TRUE(state.unfinished());
  state.begin_epoch(4);
  EXPECT_EQ(state.position(), position) << "the epoch that was restored is not begun anew";
  for (int pass = 0; pass < 2; ++pass) {
    EXPECT_EQ(later.shard().iter_batches(options).num_batches(), 0);
    EXPECT_EQ(samples_in(later.shard().iter_batches(options)), Samples{});
  }
  EXPECT_EQ(state.position(), position) << "nothing has moved yet";
  auto range = later.shard().iter_batches(options);
  EXPECT_EQ(range.num_batches(), 3);
  for (const auto& batch : range) append(samples, batch);
  EXPECT_EQ(samples, undisturbed);
  EXPECT_FALSE(state.unfinished());
  EXPECT_EQ(samples_in(later.shard().iter_batches(options)).size(), 10u) << "and after it a whole one";
  state.restore(position);
  state.begin_epoch(5);
  EXPECT_FALSE(state.unfinished());
  EXPECT_EQ(samples_in(later.shard().iter_batches(options)).size(), 10u);
}

TEST(Batches, AnIteratorThatIsAtItsEndIsAnError) {
  const World world(4, 1);
  const auto fact = [](auto&& use) -> std::string {
    try {
      use();
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  auto range = world.shard().iter_batches({.batch_size = 4});
  auto batch = range.begin();
  EXPECT_EQ((*batch).size(), 4);
  ++batch;
  ASSERT_TRUE(batch == range.end());
  EXPECT_NE(fact([&] { *batch; }).find("no more batches"), std::string::npos);
  EXPECT_NE(fact([&] { ++batch; }).find("no more batches"), std::string::npos);
  // A pass that the epoch had finished before the run was resumed.
  auto& state = *world.states[0];
  state.begin_epoch(0);
  const auto complete = samples_in(world.shard().iter_batches({.batch_size = 4}));
  ASSERT_EQ(complete.size(), 4u);
  auto half = world.shard().iter_batches({.batch_size = 2});
  half.begin();
  const auto position = state.position();
  const World later(4, 1);
  later.states[0]->restore(position);
  later.states[0]->begin_epoch(0);
  auto empty = later.shard().iter_batches({.batch_size = 4});
  auto none = empty.begin();
  ASSERT_TRUE(none == empty.end());
  EXPECT_NE(fact([&] { *none; }).find("come back empty"), std::string::npos);
}

TEST(Position, TheLastBatchInHandCountsAsTaken) {
  const World world(4, 1);
  Json position;
  run(world, {.batch_size = 2}, 2, &position);
  EXPECT_EQ(position.at("consumed"), 4);
  const World later(4, 1);
  later.states[0]->restore(position);
  EXPECT_EQ(samples_in(later.shard().iter_batches({.batch_size = 2})), Samples{});
  EXPECT_FALSE(later.states[0]->unfinished());
}

TEST(Position, ARangeThatDiesEarlyEndsItsPass) {
  for (const int ahead : {0, 1, 3}) {
    const World world(100, 1);
    auto& state = *world.states[0];
    for (auto& batch : world.shard().iter_torch_batches({.batch_size = 2, .prefetch_batches = ahead})) {
      EXPECT_EQ(batch.size(), 2);
      EXPECT_EQ(state.position().at("consumed"), 2) << "what is read ahead is not taken";
      EXPECT_TRUE(state.unfinished());
      break;
    }
    EXPECT_FALSE(state.unfinished());
    EXPECT_EQ(world.weight().global, 0);
    EXPECT_EQ(state.position().at("passes"), 1);
    EXPECT_EQ(state.position().at("consumed"), 0);
    auto first = world.shard().iter_batches();
    first.begin();
    auto second = world.shard().iter_batches();
    EXPECT_EQ(state.position().at("passes"), 1) << "a pass begins when its iteration does";
    second.begin();
    EXPECT_EQ(state.position().at("passes"), 2) << "the next pass ends the one before";
    first = world.shard().iter_batches();
    EXPECT_EQ(state.position().at("passes"), 2);
    EXPECT_TRUE(state.unfinished()) << "the second one";
  }
}

TEST(Position, IsRefusedForOtherData) {
  const World world(10, 1);
  Json position;
  run(world, {.batch_size = 2}, 2, &position);
  const World later(11, 1);
  later.states[0]->restore(position);
  EXPECT_THROW(later.shard().iter_batches().begin(), Error);
  for (const auto& [key, absurd] :
       {std::pair<const char*, int>{"finished", 7}, {"finished", -1}, {"consumed", 11}, {"consumed", -1}}) {
    auto forged = position;
    forged[key] = absurd;
    EXPECT_THROW(World(10, 1).states[0]->restore(forged), Error) << key << " " << absurd;
  }
  try {
    later.states[0]->restore({{"epoch", 1}});
    FAIL() << "a position lacks fields";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::data);
  }
}

TEST(Position, AnotherGlobalBatchIsSaid) {
  Json position;
  run(World(100, 4), {.batch_size = 8}, 1, &position);
  const auto said = [&](int ranks, const BatchOptions& options) {
    const World later(100, ranks);
    later.states[0]->restore(position);
    testing::internal::CaptureStderr();
    later.shard().iter_batches(options).begin();
    later.shard().iter_batches(options).begin();
    return testing::internal::GetCapturedStderr();
  };
  const auto text = said(2, {.batch_size = 8});
  EXPECT_NE(text.find("takes 16 samples"), std::string::npos) << text;
  EXPECT_NE(text.find("took 32"), std::string::npos) << text;
  EXPECT_EQ(text.find("16", text.find("takes 16") + 8), std::string::npos) << "once: " << text;
  EXPECT_EQ(said(2, {.batch_size = 16}), "");
  EXPECT_EQ(said(2, {.global_batch_size = 32}), "");
}

TEST(Position, AnotherGlobalBatchIsSaidBetweenEpochsToo) {
  Json position;
  run(World(100, 4), {.batch_size = 8}, 1000, &position);
  const auto said = [&](int ranks, const BatchOptions& options) {
    const World later(100, ranks);
    later.pass_positions[0]->begin_epoch(1);
    later.pass_positions[0]->restore("train", position, /*complete=*/true);
    testing::internal::CaptureStderr();
    for (int pass = 0; pass < 2; ++pass) later.shard().iter_batches(options).begin();
    return testing::internal::GetCapturedStderr();
  };
  const auto text = said(2, {.batch_size = 8});
  EXPECT_NE(text.find("takes 16 samples"), std::string::npos) << text;
  EXPECT_EQ(text.find("16", text.find("takes 16") + 8), std::string::npos) << "once: " << text;
  EXPECT_EQ(said(4, {.batch_size = 16}), "") << "what the program wants, at the same number of workers";
  EXPECT_EQ(said(2, {.batch_size = 16}), "");
  EXPECT_EQ(said(2, {.global_batch_size = 32}), "");
}

/// The batches of two datasets taken together.
struct Two {
  explicit Two(World& world, const BatchOptions& a = {.batch_size = 4}, const BatchOptions& b = {.batch_size = 4},
               std::int64_t samples = 10)
      : other(world.add("other", samples)), a(world.shard().iter_batches(a)), b(DatasetShard(other).iter_batches(b)) {}
  std::shared_ptr<ShardState> other;
  BatchRange a, b;
};

TEST(Weight, OfTwoPassesIsSaidUnlessTheyAreAlike) {
  for (const auto& [options, samples, alike] : {std::tuple<BatchOptions, int, bool>{{.batch_size = 4}, 10, true},
                                                {{.batch_size = 4, .shuffle = true}, 10, true},
                                                {{.batch_size = 5}, 10, false},
                                                {{.batch_size = 4, .drop_last = true}, 10, false},
                                                {{.batch_size = 4}, 12, false},
                                                {{.batch_size = 5, .training = false}, 12, true}}) {
    World world(10, 1);
    Two two(world, {.batch_size = 4}, options, samples);
    auto a = two.a.begin();
    auto b = two.b.begin();
    if (!alike) {
      try {
        world.pass_positions[0]->steps->weight();
        ADD_FAILURE() << options.batch_size;
      } catch (const Error& error) {
        const std::string text = error.what();
        EXPECT_EQ(error.code(), ExitCode::usage);
        for (const char* part : {"\"train\"", "\"other\"", "session.step(batch)"})
          EXPECT_NE(text.find(part), std::string::npos) << text;
      }
      const auto scope = world.pass_positions[0]->steps->enter_scope(step_weight_of(*b));
      EXPECT_EQ(world.weight().local, b->size());
      world.pass_positions[0]->steps->leave_scope(scope);
      EXPECT_THROW(world.pass_positions[0]->steps->weight(), Error);
      continue;
    }
    for (; a != two.a.end(); ++a, ++b) EXPECT_EQ(world.pass_positions[0]->steps->weight(), 1.0);
  }
  World world(10, 1);
  Two two(world);
  auto a = two.a.begin();
  auto b = two.b.begin();
  EXPECT_NO_THROW(world.pass_positions[0]->steps->weight());
  ++b;
  EXPECT_THROW(world.pass_positions[0]->steps->weight(), Error) << "one is further";
  ++a;
  EXPECT_NO_THROW(world.pass_positions[0]->steps->weight());
}

TEST(Weight, IsThatOfTheTrainingPassInHand) {
  World world(7, 3);
  const auto other = world.add("other", numbers(5), 2, 3);
  const auto weight = [&] { return world.pass_positions[2]->steps->weight(); };
  std::optional<Batch> kept;
  for (const auto& batch : world.shard(2).iter_batches({.batch_size = 2})) {
    const double mine = batch.global_size() == 6 ? 1.0 : 0.0;
    EXPECT_EQ(batch.weight(), mine);
    EXPECT_EQ(weight(), mine);
    for (const auto& aside : DatasetShard(other).iter_batches({.batch_size = 1, .training = false})) {
      EXPECT_EQ(aside.weight(), aside.global_size() == 3 ? 1.0 : 0.0);
      EXPECT_EQ(weight(), mine) << "validation does not count";
    }
    {
      const at::NoGradGuard no_grad;
      for ([[maybe_unused]] const auto& aside : DatasetShard(other).iter_batches({.batch_size = 1}))
        EXPECT_EQ(weight(), mine);
    }
    for ([[maybe_unused]] const auto& inner : DatasetShard(other).iter_batches({.batch_size = 2})) break;
    EXPECT_EQ(weight(), mine) << "it has come back from the inner pass";
    kept = batch;
  }
  EXPECT_EQ(weight(), 1.0);
  EXPECT_EQ(kept->weight(), 0.0) << "a batch keeps its weight";
  const auto outer = world.pass_positions[2]->steps->enter_scope(step_weight_of(*kept));
  EXPECT_EQ(weight(), 0.0);
  const auto inner = world.pass_positions[2]->steps->enter_scope(step_weight_of(Batch()));
  EXPECT_EQ(weight(), 1.0) << "all ranks count the same";
  world.pass_positions[2]->steps->leave_scope(inner);
  EXPECT_EQ(weight(), 0.0);
  world.pass_positions[2]->steps->leave_scope(outer);
  EXPECT_EQ(weight(), 1.0);
}

// The samples that an epoch's other passes have seen when one pass is stopped, and see after a resume.
TEST(Position, OnlyWhatRunsAgainComesBackEmpty) {
  struct Program {
    std::string name;
    /// Is given the batches of "train" and of "other" as they come, "other" first where both are at hand.
    std::function<void(World&, const std::shared_ptr<ShardState>&, const std::function<void(char, const Batch&)>&)>
        epoch;
  };
  const auto whole = [](const std::shared_ptr<ShardState>& state, char name, const auto& take) {
    for (const auto& batch : DatasetShard(state).iter_batches({.batch_size = 2})) take(name, batch);
  };
  const std::vector<Program> programs{
      {"one after the other",
       [&](World& world, const auto& other, const auto& take) {
         whole(other, 'o', take);
         whole(world.states[0], 't', take);
         whole(other, 'o', take);
       }},
      {"one inside the other",
       [&](World& world, const auto& other, const auto& take) {
         for (int twice = 0; twice < 2; ++twice)
           for (const auto& batch : world.shard().iter_batches({.batch_size = 2})) {
             take('t', batch);
             whole(other, 'o', take);
           }
       }},
      {"side by side, the one shorter",
       [&](World& world, const auto& other, const auto& take) {
         auto ra = world.shard().iter_batches({.batch_size = 2});
         auto rb = DatasetShard(other).iter_batches({.batch_size = 2});
         auto a = ra.begin();
         auto b = rb.begin();
         while (a != ra.end()) {
           if (b != rb.end()) take('o', *b);
           take('t', *a);
           if (b != rb.end()) ++b;
           ++a;
         }
       }},
      {"side by side, the one again and again",
       [&](World& world, const auto& other, const auto& take) {
         std::optional<BatchRange> rb;
         std::optional<BatchRange::iterator> b;
         const auto begin = [&] {
           b.reset();
           rb.emplace(DatasetShard(other).iter_batches({.batch_size = 2}));
           b = rb->begin();
         };
         begin();
         for (const auto& batch : world.shard().iter_batches({.batch_size = 2})) {
           if (*b == std::default_sentinel) begin();
           take('o', **b);
           take('t', batch);
           ++*b;
         }
       }},
  };
  for (const auto& program : programs) {
    const auto told = [&](std::int64_t stop, const Json& from, Json* until) {
      std::string seen;
      World world(12, 1);
      for (const auto& [name, position] : from.items()) world.pass_positions[0]->restore(name, position, false);
      const auto other = world.add("other", 6);
      std::int64_t trained = 0;
      struct Stop {};
      try {
        program.epoch(world, other, [&](char name, const Batch& batch) {
          seen += name + std::to_string(batch["y"][0].item<std::int64_t>()) + " ";
          if (name != 't' || ++trained != stop) return;
          *until = world.pass_positions[0]->positions();
          throw Stop();
        });
      } catch (Stop) {
      }
      return seen;
    };
    const auto undisturbed = told(-1, Json::object(), nullptr);
    for (std::int64_t stop = 1; stop <= 6; ++stop) {
      Json positions;
      const auto before = told(stop, Json::object(), &positions);
      auto after = told(-1, positions, nullptr);
      // A report inside a batch ends that batch.
      const auto rest = undisturbed.substr(before.size());
      const auto want = program.name == "one inside the other"
                            ? rest.substr(rest.find('t') == std::string::npos ? rest.size() : rest.find('t'))
                            : rest;
      EXPECT_EQ(after, want) << program.name << ", stopped after " << before;
      if (stop > 5) continue;
      // And once more, after one further batch.
      Json twice;
      const auto between = told(1, positions, &twice);
      EXPECT_EQ(told(-1, twice, nullptr), program.name == "one inside the other" ? after.substr(after.find('t', 1))
                                                                                 : after.substr(between.size()))
          << program.name << ", stopped again after " << between;
    }
  }
}

TEST(Position, OfWhatComesAfterTheRestore) {
  World world(10, 1);
  Json position;
  run(world, {.batch_size = 2}, 2, &position);
  World later(10, 1);
  later.pass_positions[0]->restore("late", position, false);
  EXPECT_EQ(later.pass_positions[0]->positions().at("late"), position) << "kept until it comes";
  EXPECT_EQ(later.pass_positions[0]->epoch_progress(), PassPositions::EpochProgress::under_way);
  const auto late = later.add("late", 10);
  EXPECT_EQ(DatasetShard(late).iter_batches({.batch_size = 2}).num_batches(), 3);
  later.pass_positions[0]->restore("never", position, false);
  later.pass_positions[0]->begin_epoch(1);
  EXPECT_FALSE(later.pass_positions[0]->positions().contains("never")) << "of another epoch";
}

TEST(Position, OfAnOldCheckpointIsTakenUpInsideTheLoopAndWithoutOne) {
  World world(10, 1);
  Json position;
  run(world, {.batch_size = 2}, 2, &position);
  for (const char* key : {"in_loop", "shuffle", "window_seed"}) position.erase(key);
  for (const bool loops : {false, true})
    for (const bool late : {false, true}) {
      World later(10, 1);
      if (loops && late) later.pass_positions[0]->enter_loop();
      later.states[0]->restore(position);
      if (loops && !late) later.pass_positions[0]->enter_loop();
      EXPECT_EQ(later.shard().iter_batches({.batch_size = 2}).num_batches(), 3) << loops << late;
    }
}

TEST(Position, ValidationCompletesNoEpoch) {
  World world(10, 1);
  const auto other = world.add("other", 10);
  for (int pass = 0; pass < 2; ++pass) {
    for ([[maybe_unused]] const auto& batch : DatasetShard(other).iter_batches({.batch_size = 3, .training = false})) {
      EXPECT_FALSE(other->unfinished());
      EXPECT_EQ(world.pass_positions[0]->epoch_progress(),
                pass == 1 ? PassPositions::EpochProgress::over : PassPositions::EpochProgress::none);
    }
    EXPECT_EQ(other->position().at("passes"), 0);
    samples_in(world.shard().iter_batches());
  }
}

/// Counts batches, and throws at batch `bad`.
class FailingPreprocessor : public Preprocessor {
 public:
  explicit FailingPreprocessor(int bad = -1) : bad_(bad) {}
  void fit(const Dataset&, const Communicator&) override {}
  using Preprocessor::transform;
  void transform(Batch& batch, at::Generator&) const override {
    if (calls++ == bad_) throw std::runtime_error("a bad sample");
    batch.set("y2", batch["y"] * 2);
  }
  Json state() const override { return {}; }
  void load_state(const Json&) override {}
  mutable std::atomic<int> calls = 0;

 private:
  int bad_;
};

// Memory is reused only when nobody can see it any more.
TEST(Batches, KeepTheirValuesWhileTheyAreHeld) {
  const std::int64_t rows = 64, features = 2048;  // large enough to be used again
  const auto x = at::arange(rows * features, at::kFloat).view({rows, features});
  const auto dataset = Dataset::from_tensors({{"x", x}});
  const Samples even{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46, 48, 50};
  Samples odd = even;
  for (auto& sample : odd) ++sample;
  std::optional<Batch> first = dataset.read(even);
  const auto view = (*first)["x"].select(1, 0).slice(0, 1, 5);
  const auto* memory = (*first)["x"].const_data_ptr();
  (*first)["x"].squeeze_().t_();
  first.reset();
  EXPECT_NE(dataset.read(odd)["x"].const_data_ptr(), memory) << "a view holds it";
  EXPECT_EQ(view[0].item<float>(), 2 * features);
  const auto* second = dataset.read(odd)["x"].const_data_ptr();
  const auto third = dataset.read(even);
  EXPECT_EQ(third["x"].const_data_ptr(), second);
  EXPECT_EQ(third["x"].sizes(), (at::IntArrayRef{26, features}));
  EXPECT_EQ(third["x"][25][3].item<float>(), 50 * features + 3);
}

TEST(Batches, GoThroughThePreprocessor) {
  const auto dataset = numbers(4).transform(std::make_shared<FailingPreprocessor>());
  EXPECT_EQ(dataset.schema().back(), (Column{"y2", at::kLong, {}}));
  EXPECT_EQ(dataset.read(Samples{3})["y2"].item<int>(), 6);
}

TEST(Batches, AnErrorOfTheReadingThreadSurfacesInItsPlace) {
  for (const int ahead : {0, 1, 3})
    for (const int bad : {0, 2}) {
      World world(100, 1);
      auto& state = *world.states[0];
      state.dataset = state.dataset.transform(std::make_shared<FailingPreprocessor>(bad));
      int seen = 0;
      try {
        for (auto& batch : world.shard().iter_torch_batches({.batch_size = 5, .prefetch_batches = ahead})) {
          EXPECT_EQ(batch.size(), 5);
          ++seen;
        }
        ADD_FAILURE() << "no error";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "a bad sample");
      }
      EXPECT_EQ(seen, bad);
      EXPECT_EQ(world.weight().global, 0);
    }
}

TEST(Batches, AnErrorIsRaisedAgain) {
  for (const int ahead : {0, 2}) {
    World world(20, 1);
    world.states[0]->dataset = world.states[0]->dataset.transform(std::make_shared<FailingPreprocessor>(2));
    auto range = world.shard().iter_torch_batches({.batch_size = 5, .prefetch_batches = ahead});
    auto batch = range.begin();
    ++batch;
    for (int again = 0; again < 3; ++again) {
      EXPECT_THROW(++batch, std::runtime_error) << again;
      EXPECT_FALSE(batch == range.end()) << "the pass is not whole";
    }
  }
}

/// Leaves out, or gives twice, each row whose y is 3.
class OtherRows : public Preprocessor {
 public:
  explicit OtherRows(bool drops) : drops_(drops) {}
  void fit(const Dataset&, const Communicator&) override {}
  bool fitted() const override { return true; }
  void transform(Batch& batch) const override {
    const auto three = batch["y"] == 3;
    const auto rows = drops_ ? at::nonzero(three.logical_not()).flatten()
                             : at::cat({at::arange(three.size(0)), at::nonzero(three).flatten()});
    for (const auto* column : {"x", "y"}) batch.set(column, batch[column].index_select(0, rows));
  }
  Json state() const override { return {}; }
  void load_state(const Json&) override {}

 private:
  bool drops_;
};

TEST(Batches, APreprocessorThatChangesTheNumberOfRowsIsRefused) {
  for (const bool drops : {true, false}) {
    World world(8, 1);
    const auto dataset = world.states[0]->dataset.transform(std::make_shared<OtherRows>(drops));
    world.states[0]->dataset = dataset;
    const std::string fact = drops ? "4 rows before it and 3 after it" : "4 rows before it and 5 after it";
    const auto expect_refusal = [&](const std::function<void()>& work) {
      try {
        work();
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::data);
        EXPECT_NE(std::string(error.what()).find(fact), std::string::npos) << error.what();
      }
    };
    for (const int ahead : {0, 1})
      expect_refusal([&] {
        for (const auto& batch : world.shard().iter_torch_batches({.batch_size = 4, .prefetch_batches = ahead}))
          EXPECT_EQ(batch.size(), 4);
      });
    expect_refusal([&] { dataset.read(Samples{1, 2, 3, 4}); });
  }
}

/// Adds a column of random numbers from torch's own generator.
class Noise : public Preprocessor {
 public:
  void fit(const Dataset&, const Communicator&) override {}
  bool fitted() const override { return true; }
  void transform(Batch& batch) const override { batch.set("noise", at::rand({batch["y"].size(0)}, at::kDouble)); }
  Json state() const override { return {}; }
  void load_state(const Json&) override {}
};

/// The noise of each sample, by the sample, in a pass over `dataset`.
std::map<std::int64_t, double> noise_of(const World& world, const BatchOptions& options, double& drawn_by_program) {
  std::map<std::int64_t, double> all;
  at::manual_seed(5);
  for (const auto& batch : world.shard().iter_torch_batches(options)) {
    for (std::int64_t i = 0; i < batch.size(); ++i)
      all[batch["y"][i].item<std::int64_t>()] = batch["noise"][i].item<double>();
    drawn_by_program = at::rand({1}, at::kDouble).item<double>();
  }
  return all;
}

TEST(Batches, RandomNumbersOfAPreprocessorAreTheSameAgain) {
  std::set<std::map<std::int64_t, double>> seen;
  std::set<double> drawn;
  for (int again = 0; again < 4; ++again)
    for (const int ahead : {0, 1, 3}) {
      World world(64, 1, true, 7);
      world.states[0]->dataset = world.states[0]->dataset.transform(std::make_shared<Noise>());
      double program = 0;
      seen.insert(noise_of(world, {.batch_size = 4, .shuffle = true, .prefetch_batches = ahead}, program));
      drawn.insert(program);
    }
  EXPECT_EQ(seen.size(), 1u) << "the same at every start";
  EXPECT_EQ(drawn.size(), 1u) << "the program's own numbers are its own";
}

/// Overrides neither transform().
class Nothing : public Preprocessor {
 public:
  void fit(const Dataset&, const Communicator&) override {}
  Json state() const override { return {}; }
  void load_state(const Json&) override {}
};

TEST(Batches, APreprocessorThatOverridesNothingIsRefused) {
  const auto dataset = numbers(4).transform(std::make_shared<Nothing>());
  try {
    dataset.read(Samples{1});
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("overrides no transform()"), std::string::npos) << error.what();
  }
}

/// Passes its generator to one that takes none.
class Passing : public Noise {
 public:
  using Preprocessor::transform;
  void transform(Batch& batch, at::Generator& generator) const override {
    static_cast<const Preprocessor&>(noise_).transform(batch, generator);
  }

 private:
  Noise noise_;
};

TEST(Prefetch, AGeneratorIsNotPassedToAPreprocessorThatTakesNone) {
  World world(8, 1);
  world.states[0]->dataset = world.states[0]->dataset.transform(std::make_shared<Passing>());
  try {
    samples_in(world.shard().iter_torch_batches({.batch_size = 4, .prefetch_batches = 1}));
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_NE(std::string(error.what()).find("passes its generator to another preprocessor that takes none"),
              std::string::npos)
        << error.what();
  }
}

TEST(Prefetch, ReadsNoFurtherAheadThanAsked) {
  for (const int ahead : {0, 1, 3}) {
    World world(100, 1);
    const auto counter = std::make_shared<FailingPreprocessor>();
    world.states[0]->dataset = world.states[0]->dataset.transform(counter);
    {
      auto range = world.shard().iter_torch_batches({.batch_size = 1, .prefetch_batches = ahead});
      auto batch = range.begin();
      ++batch;
      while (counter->calls < 2 + ahead) std::this_thread::yield();
    }
    EXPECT_EQ(counter->calls, 2 + ahead) << "two in hand, and those ahead";
  }
}

TEST(Prefetch, EndsItsThreadsWhereMemoryDoesNotSuffice) {
  // So many threads that some do their task when the list of tasks must grow.
  constexpr int threads = 64;
  bool has_failed = true;
  for (int allocations = 0; has_failed; ++allocations) {
    Prefetch::Produce nothing = []() -> std::optional<Batch> { return {}; };
    test::fail_allocation_after(allocations);
    try {
      Prefetch prefetch(std::move(nothing), 2, threads);
      test::fail_allocation_after(-1);
      EXPECT_FALSE(prefetch.next());
      has_failed = false;
    } catch (const std::exception&) {  // memory, or threads for want of it
    }
    test::fail_allocation_after(-1);
    ASSERT_LT(allocations, 1000);
  }
}

TEST(Prefetch, NothingComesAfterAnError) {
  for (const int ahead : {0, 2}) {
    Prefetch prefetch([]() -> std::optional<Batch> { throw std::runtime_error("once"); }, ahead);
    EXPECT_THROW(prefetch.next(), std::runtime_error);
    EXPECT_FALSE(prefetch.next());
  }
}

}  // namespace
}  // namespace muster::detail::data::batches_test
