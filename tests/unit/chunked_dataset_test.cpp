// Datasets in chunks, read through all of muster's ways: decoded here, straight from the file, or by HDF5.
#include "hdf5/codecs.hpp"
#include "hdf5/types.hpp"
#include "muster/dataset.hpp"
#include "muster/error.hpp"
#include "support/errors.hpp"
#include "support/hdf5_fixture.hpp"
#include "support/io_errors.hpp"
#include "unit/pass_world.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace muster::chunked_dataset_test {
namespace {

using detail::hdf5::check;
using detail::hdf5::Handle;
using test::error_of;
using test::Folder;
using test::H5File;
using Sizes = std::vector<hsize_t>;
using Samples = std::vector<std::int64_t>;
using Filters = std::function<void(hid_t creation)>;

void none(hid_t) {}
void deflate(hid_t creation) {
  H5Pset_shuffle(creation);
  H5Pset_deflate(creation, 3);
}
void checksum(hid_t creation) { H5Pset_fletcher32(creation); }
/// A filter that muster leaves to HDF5.
void scale_offset(hid_t creation) { H5Pset_scaleoffset(creation, H5Z_SO_INT, H5Z_SO_INT_MINBITS_DEFAULT); }

/// Adds a dataset of 0, 1, 2, … in chunks, and returns its values.
at::Tensor add(H5File& file, const std::string& name, const Sizes& shape, const Sizes& chunk, const Filters& filters,
               hid_t type = H5T_NATIVE_INT32, bool written = true) {
  const detail::hdf5::Lock lock;
  const auto rank = static_cast<int>(shape.size());
  const Handle space(H5Screate_simple(rank, shape.data(), nullptr), H5Sclose);
  const Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  check(H5Pset_chunk(creation.get(), rank, chunk.data()), "fixture");
  filters(creation.get());
  const std::vector<std::int64_t> sizes(shape.begin(), shape.end());
  auto values = at::arange(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>()), at::kInt)
                    .view(sizes);
  file.create(name, type, H5T_NATIVE_INT32, space.get(), creation.get(), written ? values.const_data_ptr() : nullptr);
  return values;
}

void expect_rows(const Dataset& dataset, const std::string& name, const at::Tensor& values, const Samples& samples,
                 const std::string& what) {
  const auto batch = dataset.read(samples);
  EXPECT_TRUE(at::equal(batch[name], values.index_select(0, at::tensor(samples, at::kLong)))) << what;
}

TEST(ChunkedData, IsTheSameInEveryLayoutAndCache) {
  std::mt19937 random(1);
  const auto below = [&](std::size_t bound) { return static_cast<std::size_t>(random() % bound); };
  const std::pair<const char*, Filters> filters[] = {
      {"none", none}, {"deflate", deflate}, {"checksum", checksum}, {"scale-offset", scale_offset}};
  for (int round = 0; round < 120; ++round) {
    const Folder folder;
    Sizes shape{1 + below(60)}, chunk{1 + below(20)};
    for (auto inner = below(4); inner > 0; --inner) {
      shape.push_back(1 + below(24));
      chunk.push_back(1 + below(shape.back()));
    }
    if (below(4) == 0) shape.resize(1), chunk.resize(1);
    if (below(3) == 0) std::copy(shape.begin() + 1, shape.end(), chunk.begin() + 1);
    const auto& [name, filter] = filters[below(4)];
    at::Tensor values;
    {
      H5File file(folder.file("a.h5"), below(3) == 0 ? 512 : 0);
      chunk[0] = std::min(chunk[0], shape[0]);
      values = add(file, "x", shape, chunk, filter);
    }
    for (const std::int64_t cache : {0, 3000, 1 << 20}) {
      const auto dataset = Dataset::from_hdf5({folder.file("a.h5")}, {.cache_bytes = cache});
      const auto what = std::string(name) + testing::PrintToString(shape) + testing::PrintToString(chunk);
      for (int reads = 0; reads < 6; ++reads) {
        Samples samples;
        for (auto count = below(40); count > 0; --count)
          samples.push_back(static_cast<std::int64_t>(below(shape.front())));
        if (reads == 0) {
          samples.resize(shape.front());
          std::iota(samples.begin(), samples.end(), 0);
        }
        expect_rows(dataset, "x", values, samples, what);
      }
    }
  }
}

TEST(ChunkedData, LargeChunksAreDecodedByManyThreads) {
  const Folder folder;
  at::Tensor values;
  {
    H5File file(folder.file("a.h5"));
    values = add(file, "x", {200, 64, 128}, {7, 64, 100}, deflate);
  }
  Samples all(200);
  std::iota(all.begin(), all.end(), 0);
  for (const std::int64_t cache : {0, 1 << 20, 1 << 28}) {
    const auto dataset = Dataset::from_hdf5({folder.file("a.h5")}, {.cache_bytes = cache});
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i)
      threads.emplace_back([&, i] {
        for (int reads = 0; reads < 2; ++reads) {
          expect_rows(dataset, "x", values, all, "all");
          expect_rows(dataset, "x", values, {i, 199 - i, 50 + i, 50 + i}, "some");
        }
      });
    for (auto& thread : threads) thread.join();
  }
}

TEST(ChunkedData, ChunksThatGoToBatchesInOnePieceAreKeptWhenTheyComeAgain) {
  const Folder folder;
  at::Tensor values;
  {
    H5File file(folder.file("a.h5"));
    values = add(file, "x", {200, 64, 128}, {7, 64, 128}, deflate);
  }
  const auto pass = [&](const Dataset& dataset) {
    for (std::int64_t first = 0; first < 200; first += 28) {
      Samples rows(static_cast<std::size_t>(std::min<std::int64_t>(28, 200 - first)));
      std::iota(rows.begin(), rows.end(), first);
      expect_rows(dataset, "x", values, rows, std::to_string(first));
    }
  };
  for (const std::int64_t cache : {0, 1 << 20, 1 << 28}) {
    const auto dataset = Dataset::from_hdf5({folder.file("a.h5")}, {.cache_bytes = cache});
    for (int passes = 0; passes < 3; ++passes) pass(dataset);
  }
  const Dataset once(folder.file("a.h5")), twice(folder.file("a.h5"));
  pass(once);
  for (int passes = 0; passes < 2; ++passes) pass(twice);
  std::filesystem::resize_file(folder.file("a.h5"), 2048);
  EXPECT_NE(error_of([&] { pass(once); }).find("shorter"), std::string::npos);
  pass(twice);
}

TEST(ChunkedData, ChunksThatWereNeverWrittenAreFilled) {
  const Folder folder;
  const auto with_fill = [](hid_t creation) {
    const std::int32_t value = 7;
    H5Pset_fill_value(creation, H5T_NATIVE_INT32, &value);
  };
  const auto never = [](hid_t creation) {
    const std::int32_t value = 7;
    H5Pset_fill_value(creation, H5T_NATIVE_INT32, &value);
    H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER);
  };
  {
    H5File file(folder.file("a.h5"));
    add(file, "default", {20, 5}, {3, 2}, none, H5T_NATIVE_INT32, false);
    add(file, "seven", {20, 5}, {3, 2}, with_fill, H5T_NATIVE_INT32, false);
    add(
        file, "packed", {20, 5}, {3, 2}, [&](hid_t creation) { with_fill(creation), deflate(creation); },
        H5T_NATIVE_INT32, false);
    add(file, "never", {20, 5}, {3, 2}, never, H5T_NATIVE_INT32, false);
  }
  const auto batch = Dataset(folder.file("a.h5")).read(Samples{0, 7, 19});
  EXPECT_TRUE(at::equal(batch["default"], at::full({3, 5}, 0, at::kInt)));
  EXPECT_TRUE(at::equal(batch["seven"], at::full({3, 5}, 7, at::kInt)));
  EXPECT_TRUE(at::equal(batch["packed"], at::full({3, 5}, 7, at::kInt)));
  EXPECT_TRUE(at::equal(batch["never"], at::full({3, 5}, 0, at::kInt)));
}

TEST(ChunkedData, OtherTypesAreConverted) {
  const Folder folder;
  at::Tensor values;
  {
    H5File file(folder.file("a.h5"));
    for (const auto& [name, type] :
         {std::pair("big", H5T_STD_I32BE), std::pair("wide", H5T_STD_U32LE), std::pair("narrow", H5T_STD_U16LE)})
      values = add(file, name, {40, 3}, {7, 2}, deflate, type);
    const std::uint8_t flags[] = {0, 1, 2, 255};
    const auto boolean = detail::hdf5::memory_type_of(at::kBool);
    file.dataset("flags", {4}, boolean.get(), boolean.get(), flags, {.chunk = 2, .deflate = 1});
  }
  for (const char* name : {"big", "wide", "narrow"}) {
    const auto dataset = Dataset::from_hdf5({folder.file("a.h5")}, {.columns = {name}});
    EXPECT_TRUE(at::equal(dataset.read(Samples{0, 39, 9})[name].to(at::kInt),
                          values.index_select(0, at::tensor({0, 39, 9}, at::kLong))))
        << name;
  }
  const auto flags = Dataset::from_hdf5({folder.file("a.h5")}, {.columns = {"flags"}}).read(Samples{0, 1, 2, 3});
  const auto* bytes = static_cast<const std::uint8_t*>(flags["flags"].const_data_ptr());
  EXPECT_EQ(std::vector<std::uint8_t>(bytes, bytes + 4), (std::vector<std::uint8_t>{0, 1, 1, 1}));
}

TEST(ChunkedData, AnUnsignedNumberThatNoTensorHoldsIsAnError) {
  const Folder folder;
  const std::uint64_t values[] = {1, 2, (1ULL << 63) + 5};
  H5File(folder.file("a.h5")).dataset("id", {3}, H5T_STD_U64LE, H5T_NATIVE_UINT64, values, {.chunk = 2, .deflate = 1});
  const Dataset dataset(folder.file("a.h5"));
  EXPECT_TRUE(at::equal(dataset.read(Samples{1})["id"], at::tensor(std::vector<std::int64_t>{2})));
  EXPECT_NE(error_of([&] { dataset.read(Samples{2}); }).find("row 2 holds a number above 2^63"), std::string::npos);
}

TEST(ChunkedData, ADamagedChunkIsNamed) {
  const Folder folder;
  {
    H5File file(folder.file("a.h5"));
    add(file, "x", {40, 50}, {10, 50}, [](hid_t creation) { H5Pset_deflate(creation, 6), checksum(creation); });
  }
  const auto path = folder.file("a.h5");
  std::ifstream in(path, std::ios::binary);
  std::string content((std::istreambuf_iterator<char>(in)), {});
  // Each stored chunk begins with the two bytes of zlib; the third one is damaged.
  std::size_t at = 0;
  for (int chunk = 0; chunk < 3; ++chunk) at = content.find("\x78\x9c", at + 1);
  ASSERT_NE(at, std::string::npos);
  content[at + 50] ^= 0x55;
  std::ofstream(path, std::ios::binary) << content;
  const Dataset dataset(path);
  const auto message = error_of([&] { dataset.read(Samples{5, 25}); });
  EXPECT_NE(message.find("a.h5:/x, chunk ("), std::string::npos) << message;
  EXPECT_NE(message.find("its checksum is wrong. The file is damaged"), std::string::npos) << message;
}

TEST(ChunkedData, ADamagedChunkIsAnErrorWhenItsBatchIsDue) {
  const Folder folder;
  {
    H5File file(folder.file("a.h5"));
    add(file, "y", {400}, {10}, [](hid_t creation) { H5Pset_deflate(creation, 6), checksum(creation); });
  }
  std::ifstream in(folder.file("a.h5"), std::ios::binary);
  std::string content((std::istreambuf_iterator<char>(in)), {});
  std::size_t at = 0;
  for (int chunk = 0; chunk < 17; ++chunk) at = content.find("\x78\x9c", at + 1);
  ASSERT_NE(at, std::string::npos);
  content[at + 8] ^= 0x55;
  std::ofstream(folder.file("b.h5"), std::ios::binary) << content;
  // Half of the cache holds 8 chunks: so there are lanes, which read their next chunks ahead.
  const auto open = [&](const char* name) {
    return Dataset::from_hdf5({folder.file(name)}, {.cache_bytes = 16 * 10 * 4});
  };
  const auto damaged = open("b.h5");
  const auto is_damaged = [&](std::int64_t row) { return error_of([&] { damaged.read(Samples{row}); }) != "no error"; };
  const BatchOptions options{.batch_size = 4, .shuffle = true};
  int due = 0;
  namespace pass_world = detail::data::pass_world;
  for (const auto& batch : pass_world::World(open("a.h5"), 1).shard().iter_batches(options)) {
    Samples rows;
    pass_world::append(rows, batch);
    if (std::ranges::any_of(rows, is_damaged)) break;
    ++due;
  }
  EXPECT_GT(due, 1);
  EXPECT_LT(due, 100);
  int taken = 0;
  const pass_world::World world(damaged, 1);
  const auto message = error_of([&] {
    for (const auto& batch : world.shard().iter_batches(options)) taken += static_cast<int>(batch.size() > 0);
  });
  EXPECT_NE(message.find("its checksum is wrong"), std::string::npos) << message;
  EXPECT_EQ(taken, due);
}

TEST(ChunkedData, AFileThatBecameShorterIsAnError) {
  const Folder folder;
  {
    H5File file(folder.file("a.h5"));
    add(file, "plain", {4000}, {1000}, none);
    add(file, "packed", {4000}, {1000}, deflate);
  }
  for (const char* name : {"plain", "packed"}) {
    std::filesystem::copy_file(folder.file("a.h5"), folder.file(name));
    const auto dataset = Dataset::from_hdf5({folder.file(name)}, {.columns = {name}});
    EXPECT_EQ(dataset.read(Samples{0}).size(), 1);
    std::filesystem::resize_file(folder.file(name), 2048);
    EXPECT_NE(error_of([&] { dataset.read(Samples{3999}); }).find("shorter"), std::string::npos);
  }
}

TEST(ChunkedData, AnErrorOfTheDiskIsTriedAgain) {
  const Folder folder;
  {
    H5File file(folder.file("a.h5"));
    add(file, "x", {200000}, {2}, none);
  }
  const Dataset dataset(folder.file("a.h5"));
  EXPECT_EQ(dataset.count(), 200000);
  {
    const test::IoError sick("pread", "a.h5", EIO);  // HDF5 reads the index
    EXPECT_NE(error_of([&] { dataset.read(Samples{150000}); }, ExitCode::retry).find("try again"), std::string::npos);
  }
  EXPECT_TRUE(at::equal(dataset.read(Samples{150000})["x"], at::tensor({150000}, at::kInt)));
}

TEST(ChunkedData, AFilterThatNobodyHasIsNamed) {
  const Folder folder;
  const auto copy = [](unsigned, std::size_t, const unsigned*, std::size_t bytes, std::size_t*, void**) {
    return bytes;
  };
  const H5Z_class2_t mine{H5Z_CLASS_T_VERS, 300, 1, 1, "mine", nullptr, nullptr, copy};
  ASSERT_GE(H5Zregister(&mine), 0);
  {
    H5File file(folder.file("a.h5"));
    add(file, "x", {40}, {10}, [](hid_t creation) { H5Pset_filter(creation, 300, 0, 0, nullptr); });
  }
  H5Zunregister(300);
  EXPECT_NE(error_of([&] {
              Dataset(folder.file("a.h5")).count();
            }).find("a.h5:/x: it is compressed by a filter that neither muster nor HDF5 was built with here (mine)"),
            std::string::npos);
}

}  // namespace
}  // namespace muster::chunked_dataset_test
