// Decoded chunks that the ranks of a node keep together.
#include "comm/make_world.hpp"
#include "data/sources/node_chunks.hpp"
#include "data/sources/share_chunks.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"
#include "muster/muster.hpp"
#include "muster/operator.hpp"
#include "rows/operator_program.hpp"
#include "support/hdf5_fixture.hpp"
#include "support/io_errors.hpp"
#include "support/job.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace muster::shared_chunks_test {
namespace {

using detail::data::share_chunks;
using detail::data::Source;
using test::H5File;
using test::world;
using Samples = std::vector<std::int64_t>;
using Sources = std::vector<std::shared_ptr<Source>>;

constexpr std::int64_t rows = 400, chunks_of_column = 40;
constexpr int all_chunks = 2 * chunks_of_column;  ///< of x and y

/// A file of test::H5File::columns() in chunks of ten rows. Collective.
std::string write(const std::filesystem::path& folder, test::Layout layout = {.chunk = 10, .deflate = 3}) {
  const auto path = (folder / "a.h5").string();
  if (world().rank() == 0) H5File(path).columns(rows, 0, layout);
  world().barrier();
  return path;
}

/// Shares the chunks of these datasets. Collective.
void share(const std::vector<Dataset>& datasets) {
  Sources sources;
  for (const auto& dataset : datasets) sources.push_back(detail::data::source_of(dataset));
  share_chunks(world(), sources);
}

const detail::node::SharedSlots* slots_of(const Dataset& dataset) {
  const auto* const chunks = detail::data::source_of(dataset)->node_chunks();
  return chunks == nullptr ? nullptr : chunks->slots();
}

Samples shuffled(std::int64_t count, int seed) {
  auto samples = test::counting<std::int64_t>(static_cast<std::size_t>(count));
  std::ranges::shuffle(samples, std::mt19937(static_cast<unsigned>(seed)));
  return samples;
}

void expect_rows(const Batch& batch, const Samples& samples) {
  const auto y = at::tensor(samples, at::kLong);
  EXPECT_TRUE(at::equal(batch["y"], y));
  EXPECT_TRUE(at::equal(batch["x"], (3 * y.unsqueeze(1) + at::arange(3)).to(at::kFloat)));
}

Samples samples_of(const Batch& batch) {
  const auto* const first = batch["y"].const_data_ptr<std::int64_t>();
  return {first, first + batch["y"].numel()};
}

/// Reads all samples in a random order, in batches of 32, and checks them.
void read_all(const Dataset& dataset, int seed) {
  const auto all = shuffled(rows, seed);
  for (std::size_t first = 0; first < all.size(); first += 32) {
    const Samples some(all.begin() + static_cast<long>(first),
                       all.begin() + static_cast<long>(std::min(all.size(), first + 32)));
    expect_rows(dataset.read(some), some);
  }
}

/// Calls read() on one rank after the other; returns how often they have read from the file in all. Collective.
int reads_in_turn(const std::function<void()>& read) {
  std::int64_t count = 0;
  for (int turn = 0; turn < world().size(); ++turn) {
    if (turn == world().rank()) {
      const test::IoError reads("preadv", "a.h5", 0);
      read();
      count = reads.count();
    }
    world().barrier();
  }
  return static_cast<int>(world().all_reduce(count));
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return std::to_string(static_cast<int>(error.code())) + ' ' + error.what();
  }
  return "no error";
}

#define NEEDS_TWO_RANKS \
  if (world().size() == 1) GTEST_SKIP() << "needs two ranks"

TEST(SharedChunks, AreDecodedOnceOnTheNode) {
  NEEDS_TWO_RANKS;
  const auto path = write(test::shared_folder());
  const Dataset alone(path), shared(path);
  share({shared});
  ASSERT_NE(slots_of(shared), nullptr);
  EXPECT_EQ(slots_of(alone), nullptr);
  const auto read = [](const Dataset& dataset) { return [&] { read_all(dataset, world().rank()); }; };
  EXPECT_EQ(reads_in_turn(read(alone)), world().size() * all_chunks);
  EXPECT_EQ(reads_in_turn(read(shared)), all_chunks);
  EXPECT_EQ(reads_in_turn(read(shared)), 0);
}

TEST(SharedChunks, OfOneRankAreItsOwn) {
  if (world().size() > 1) GTEST_SKIP() << "for one rank";
  const Dataset dataset(write(test::shared_folder()));
  share({dataset});
  EXPECT_EQ(slots_of(dataset), nullptr);
  read_all(dataset, 1);
}

TEST(SharedChunks, OfWindowsAndRaggedSamplesAndPartsAreSharedToo) {
  NEEDS_TWO_RANKS;
  const auto folder = test::shared_folder();
  const auto path = (folder / "a.h5").string();
  if (world().rank() == 0) {
    H5File file(path);
    const auto values = test::counting<std::int64_t>(4000);
    file.dataset("x", {200, 20}, H5T_STD_I64LE, H5T_NATIVE_INT64, values.data(), {.chunk = 10, .deflate = 3});
    file.dataset("tokens", {4000}, H5T_STD_I64LE, H5T_NATIVE_INT64, values.data(), {.chunk = 100, .deflate = 3});
    std::vector<std::int64_t> offsets(201);
    for (std::size_t i = 0; i < offsets.size(); ++i) offsets[i] = static_cast<std::int64_t>(20 * i);
    file.dataset("offsets", {201}, H5T_STD_I64LE, H5T_NATIVE_INT64, offsets.data());
  }
  world().barrier();
  const auto windows = Dataset::windows({path + ":/x"}, {.size = {1, 20}});
  const auto ragged = Dataset::ragged(path, {.values = {"tokens"}});
  const auto whole = Dataset::from_hdf5({path}, {.columns = {"x"}});
  const auto parts = whole.random_split({0.5, 0.5}, 1);
  const auto mapped = whole.map_batches([](Batch& batch) { batch.set("x", batch["x"] + 0); });
  share({windows, ragged, parts[0], parts[1], mapped});
  for (const auto& dataset : {windows, ragged, mapped}) ASSERT_NE(slots_of(dataset), nullptr);
  EXPECT_EQ(slots_of(parts[0]), slots_of(mapped)) << "one segment";
  EXPECT_EQ(slots_of(parts[1]), slots_of(mapped));
  const auto check = [](const Dataset& dataset, const std::string& name) {
    const auto samples = shuffled(200, world().rank());
    const auto expected = 20 * at::tensor(samples, at::kLong).unsqueeze(1) + at::arange(20);
    EXPECT_TRUE(at::equal(dataset.read(samples)[name].reshape({200, 20}), expected)) << name;
  };
  EXPECT_EQ(reads_in_turn([&] { check(windows, "x"); }), 20);
  EXPECT_EQ(reads_in_turn([&] { check(ragged, "tokens"); }), 40);
  EXPECT_EQ(reads_in_turn([&] {
              for (const auto& part : parts) part.read(test::counting<std::int64_t>(100));
              check(mapped, "x");
            }),
            20);
}

TEST(SharedChunks, AreUsedByThreadsOfAllRanksAtOnce) {
  NEEDS_TWO_RANKS;
  const auto path = write(test::shared_folder());
  for (int round = 0; round < 10; ++round) {
    const Dataset one(path), two(path);
    share({one, two});
    ASSERT_NE(slots_of(one), slots_of(two));
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t)
      threads.emplace_back([&, t] { read_all(t == 2 ? two : one, 10 * round + t + world().rank()); });
    for (auto& thread : threads) thread.join();
    world().barrier();
    const test::IoError reads("preadv", "a.h5", 0);
    read_all(one, round);
    read_all(two, round);
    EXPECT_EQ(reads.count(), 0) << "each chunk is there for everybody";
    world().barrier();
  }
}

TEST(SharedChunks, AreSharedByATrainerAndStayShared) {
  NEEDS_TWO_RANKS;
  const auto storage = test::shared_folder();
  const Dataset dataset(write(storage));
  const detail::node::SharedSlots* first = nullptr;
  for (const std::string name : {"first", "second"}) {
    Samples seen;
    const test::Job job{storage, {}, {.run_config = {.name = name}, .datasets = {{"train", dataset}}}};
    const auto code =
        test::run(job, [&](Session& session, const Config&) {
          for (auto epoch : session.epochs(2)) {
            for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 7, .shuffle = true})) {
              const auto samples = samples_of(batch);
              expect_rows(batch, samples);
              if (epoch == 0) seen.insert(seen.end(), samples.begin(), samples.begin() + batch.size());
            }
          }
        }).first;
    EXPECT_EQ(code, 0);
    ASSERT_NE(slots_of(dataset), nullptr);
    EXPECT_TRUE(first == nullptr || slots_of(dataset) == first) << "those of the first run";
    first = slots_of(dataset);
    EXPECT_EQ(world().all_reduce(static_cast<std::int64_t>(seen.size())), rows);
  }
  world().barrier();
  const test::IoError reads("preadv", "a.h5", 0);
  read_all(dataset, 3);
  EXPECT_EQ(reads.count(), 0);
}

/// Trains nothing on the dataset of the test, and checks its samples.
struct Reading : TrainingOperator {
  static inline std::optional<Dataset> dataset;
  void setup(const Config&) override {
    register_data({*dataset, {.batch_size = 7}}, OperatorLoader(*dataset, {.batch_size = 9}));
  }
  Metrics train_batch(Batch& batch, const BatchInfo&) override {
    expect_rows(batch, samples_of(batch));
    return {{"num_samples", batch.size()}};
  }
  Metrics validate_batch(Batch& batch, const BatchInfo& info) override { return train_batch(batch, info); }
};

TEST(SharedChunks, AreSharedByAnOperator) {
  NEEDS_TWO_RANKS;
  const auto& dataset = Reading::dataset.emplace(write(test::shared_folder()));
  test::on_all([](Launch& launch) {
    OperatorTrainer<Reading> trainer(launch, test::all_ranks(launch));
    trainer.train();
    trainer.validate();
  });
  EXPECT_NE(slots_of(dataset), nullptr);
  Reading::dataset.reset();
}

TEST(SharedChunks, ThatARankHasAlreadyGoToTheNode) {
  NEEDS_TWO_RANKS;
  const Dataset dataset(write(test::shared_folder()));
  if (world().rank() < 2)
    for (std::int64_t row = world().rank() == 0 ? 0 : rows / 4; row < rows; row += 10) dataset.read(Samples{row});
  world().barrier();
  share({dataset});
  world().barrier();
  for (std::size_t chunk = 0; chunk < chunks_of_column; ++chunk) EXPECT_NE(slots_of(dataset)->find(0, chunk), nullptr);
  EXPECT_EQ(reads_in_turn([&] { read_all(dataset, 4); }), 0);
}

TEST(SharedChunks, OfARankThatStopsWhileItDecodesDelayNobody) {
  NEEDS_TWO_RANKS;
  const Dataset dataset(write(test::shared_folder()));
  share({dataset});
  std::vector<detail::node::SharedSlots::Claim> held;
  if (world().rank() == 0)
    for (const std::size_t chunk : {0, 7, 39}) {
      held.push_back(*slots_of(dataset)->claim(0, chunk));
      ASSERT_TRUE(held.back().reserve());
      held.back().memory()[0] = std::byte{99};
    }
  world().barrier();
  for (int pass = 0; pass < 2; ++pass) read_all(dataset, pass);
  world().barrier();
  held.clear();
  world().barrier();
  EXPECT_EQ(reads_in_turn([&] { read_all(dataset, 5); }), 3) << "then it is decoded for all";
}

TEST(SharedChunks, ThatOneRankCannotReadAreReadByTheOthers) {
  NEEDS_TWO_RANKS;
  const Dataset dataset(write(test::shared_folder()));
  share({dataset});
  if (world().rank() == 0) {
    const test::IoError sick("preadv", "a.h5", EIO);
    EXPECT_NE(error_of([&] { dataset.read(Samples{123}); }).find("Input/output error"), std::string::npos);
  }
  world().barrier();
  if (world().rank() == 1) read_all(dataset, 1);
  world().barrier();
  const test::IoError reads("preadv", "a.h5", 0);
  read_all(dataset, 2);
  EXPECT_EQ(reads.count(), 0);
}

TEST(SharedChunks, ThatAreDamagedAreTheSameErrorOnAllRanks) {
  NEEDS_TWO_RANKS;
  const auto folder = test::shared_folder();
  const auto path = write(folder);
  if (world().rank() == 0) {
    std::ifstream in(path, std::ios::binary);
    std::string content((std::istreambuf_iterator<char>(in)), {});
    std::size_t at = 0;
    for (int chunk = 0; chunk < 5; ++chunk) at = content.find("\x78\x5e", at + 1);
    ASSERT_NE(at, std::string::npos);
    content[at + 20] ^= 0x55;
    std::ofstream(path, std::ios::binary) << content;
  }
  world().barrier();
  const Dataset alone(path), shared(path);
  share({shared});
  ASSERT_NE(slots_of(shared), nullptr);
  const auto errors_of = [](const Dataset& dataset) {
    std::vector<std::string> errors;
    for (std::int64_t row = 0; row < rows; row += 10) errors.push_back(error_of([&] { dataset.read(Samples{row}); }));
    return errors;
  };
  const auto expected = errors_of(alone);
  EXPECT_EQ(std::ranges::count(expected, "no error"), chunks_of_column - 1);
  for (int pass = 0; pass < 2; ++pass) EXPECT_EQ(errors_of(shared), expected);
}

TEST(SharedChunks, AreReadInAChildOfFork) {
  NEEDS_TWO_RANKS;
  const Dataset dataset(write(test::shared_folder()));
  share({dataset});
  if (world().rank() == 0) dataset.read(Samples{5, 105, 205});
  world().barrier();
  const auto reads_well = [&] {
    const auto batch = dataset.read(Samples{5, 6, 7, 105, 206, 399});
    return at::equal(batch["y"], at::tensor({5, 6, 7, 105, 206, 399}, at::kLong));
  };
  const pid_t child = ::fork();
  if (child == 0) ::_exit(reads_well() && reads_well() ? 0 : 1);
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  world().barrier();
  EXPECT_EQ(reads_in_turn([&] { read_all(dataset, 1); }), all_chunks - 6) << "the child has filled none";
}

TEST(SharedChunks, AreNotOfOtherDataOrOnesThatDoNotFit) {
  NEEDS_TWO_RANKS;
  const auto folder = test::shared_folder();
  const auto path = write(folder);
  const auto plain = (folder / "plain.h5").string(), own = (folder / std::to_string(world().rank())).string();
  if (world().rank() == 0) H5File(plain).columns(rows);
  std::filesystem::create_directory(own);
  std::filesystem::copy_file(path, own + "/a.h5");
  world().barrier();
  const bool is_last = world().rank() == world().size() - 1;
  const Dataset contiguous(plain), copies(own + "/a.h5"), tensors = Dataset::from_tensors({{"x", at::arange(7)}});
  const auto large = Dataset::from_hdf5({path}, {.cache_bytes = 1000});
  const auto uneven = Dataset::from_hdf5({path}, {.cache_bytes = is_last ? 1000 : 1 << 20});
  const auto other_columns = Dataset::from_hdf5({path}, {.columns = {is_last ? "x" : "y"}});
  const Dataset fits(path);
  share({contiguous, copies, tensors, large, uneven, other_columns, fits});
  for (const auto& dataset : {contiguous, copies, tensors, large, uneven, other_columns})
    EXPECT_EQ(slots_of(dataset), nullptr);
  EXPECT_NE(slots_of(fits), nullptr);
  for (const auto& dataset : {contiguous, copies, large, uneven, fits}) read_all(dataset, world().rank());
}

TEST(SharedChunks, AreOfTheRanksThatHaveData) {
  NEEDS_TWO_RANKS;
  const Dataset dataset(write(test::shared_folder()));
  share(world().rank() == 0 ? std::vector<Dataset>{} : std::vector<Dataset>{dataset});
  EXPECT_EQ(slots_of(dataset) != nullptr, world().rank() > 0 && world().size() > 2);
  EXPECT_EQ(reads_in_turn([&] { read_all(dataset, 1); }), 2 * all_chunks) << "rank 0 and the others";
}

TEST(SharedChunks, OfEachNodeAreItsOwn) {
  if (world().size() != 4) GTEST_SKIP() << "needs four ranks";
  const auto path = write(test::shared_folder());
  for (const std::vector<int>& node_of_rank : std::vector<std::vector<int>>{{0, 0, 1, 1}, {0, 1, 1, 1}, {0, 1, 2, 3}}) {
    detail::comm::Placement placement{.node_of_rank = node_of_rank, .hosts = {}};
    for (const int node : node_of_rank) placement.hosts.push_back(std::to_string(node));
    const auto nodes = detail::comm::make_world(world(), std::move(placement));
    const Dataset dataset(path);
    const auto source = detail::data::source_of(dataset);
    share_chunks(nodes, {&source, 1});
    EXPECT_EQ(slots_of(dataset) != nullptr, nodes.topology().local_size > 1);
    EXPECT_EQ(reads_in_turn([&] { read_all(dataset, world().rank()); }), nodes.topology().num_nodes * all_chunks);
  }
}

/// Where /dev/shm is small: tests/cluster/small-shared-memory.
TEST(SharedChunks, AreOfEachRankWhereSharedMemoryIsFull) {
  NEEDS_TWO_RANKS;
  if (std::filesystem::space("/dev/shm").capacity > (std::uintmax_t{64} << 20)) GTEST_SKIP() << "/dev/shm is large";
  const auto folder = test::shared_folder();
  const auto path = (folder / "large.h5").string();
  constexpr std::int64_t many = 500'000, per_chunk = 10'000;  // 4 MB in 50 chunks
  const auto values = test::counting<std::int64_t>(many);
  if (world().rank() == 0)
    H5File(path).dataset("y", {many}, H5T_STD_I64LE, H5T_NATIVE_INT64, values.data(),
                         {.chunk = per_chunk, .deflate = 1});
  world().barrier();
  const Dataset dataset(path);
  const auto check = [&](const Dataset& of, int seed) {
    auto samples = shuffled(many, seed);
    samples.resize(20'000);
    EXPECT_TRUE(at::equal(of.read(samples)["y"], at::tensor(samples, at::kLong)));
  };
  share({dataset});
  ASSERT_NE(slots_of(dataset), nullptr) << "there is room";
  if (world().rank() == 0)  // backwards, so that no chunk is decoded ahead
    for (std::int64_t row = 19 * per_chunk; row >= 0; row -= per_chunk) dataset.read(Samples{row});
  world().barrier();
  // Then others fill /dev/shm.
  std::optional<detail::node::SharedSegment> others;
  if (world().rank() == 0) {
    const auto free = std::filesystem::space("/dev/shm").available;
    others = detail::node::SharedSegment::create(free);
    others->reserve(0, free);
  }
  world().barrier();
  const Dataset late(path);
  share({late});
  EXPECT_EQ(slots_of(late), nullptr) << "there is no room";
  for (int pass = 0; pass < 3; ++pass) {
    check(dataset, pass);
    check(late, pass);
  }
  std::int64_t there = 0;
  for (std::size_t chunk = 0; chunk < 50; ++chunk) there += slots_of(dataset)->find(0, chunk) != nullptr;
  EXPECT_EQ(there, 20) << "the others are each rank's own";
  world().barrier();
}

}  // namespace
}  // namespace muster::shared_chunks_test
