// Chunks of HDF5 datasets, found and decoded without HDF5, in files that libhdf5 has written.
#include "base/file.hpp"
#include "hdf5/chunk_index.hpp"
#include "hdf5/codecs.hpp"
#include "hdf5/file.hpp"
#include "hdf5/filter_pipeline.hpp"
#include "muster/convert.hpp"
#include "muster/dataset.hpp"
#include "muster/error.hpp"
#include "support/chunk_encoders.hpp"
#include "support/chunk_reader.hpp"
#include "support/hdf5_fixture.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

namespace muster::detail::hdf5::chunks_test {
namespace {

using test::Bytes;
using test::Folder;
using Sizes = std::vector<hsize_t>;

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::data);
    return error.what();
  }
  return "no error";
}

/// A chunked dataset "x" in a file of its own.
struct Plan {
  Sizes shape, chunk;
  Sizes most = {};  ///< the largest shape; as `shape` if empty
  hid_t type = H5T_NATIVE_INT32;
  std::function<void(hid_t creation)> filters = [](hid_t) {};
  H5F_libver_t oldest = H5F_LIBVER_EARLIEST;
  hsize_t user_block = 0;
  std::function<void(hid_t dataset)> write = {};  ///< in place of writing all values
};

std::size_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::size_t{1}, std::multiplies<>());
}

/// Writes the file, with values that count up in the bytes of the type, and returns them.
Bytes write(const std::string& path, const Plan& plan) {
  const Lock lock;
  const Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose), creation(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
  check(H5Pset_libver_bounds(access.get(), plan.oldest, H5F_LIBVER_LATEST), "fixture");
  check(H5Pset_userblock(creation.get(), plan.user_block), "fixture");
  const Handle file(check(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation.get(), access.get()), "fixture"), H5Fclose);
  const int rank = static_cast<int>(plan.shape.size());
  const Handle space(H5Screate_simple(rank, plan.shape.data(), plan.most.empty() ? nullptr : plan.most.data()),
                     H5Sclose);
  const Handle layout(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  check(H5Pset_chunk(layout.get(), rank, plan.chunk.data()), "fixture");
  plan.filters(layout.get());
  const Handle dataset(
      check(H5Dcreate2(file.get(), "x", plan.type, space.get(), H5P_DEFAULT, layout.get(), H5P_DEFAULT), "fixture"),
      H5Dclose);
  std::mt19937_64 random(1);
  auto values = test::smooth_values(random, product(plan.shape), H5Tget_size(plan.type));
  if (plan.write)
    plan.write(dataset.get());
  else
    check(H5Dwrite(dataset.get(), plan.type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()), "fixture");
  return values;
}

/// The values of dataset "x"; `fill` is in the bytes of those that were never written.
Bytes read(const std::string& path, std::byte fill = {}) {
  const auto file = open_file(path);
  return test::read_chunks(file.get(), File(path, File::Mode::read), "x", fill);
}

TEST(Chunks, AreFoundByEveryIndexOfHdf5) {
  const Folder folder;
  const auto unlimited = H5S_UNLIMITED;
  const auto early = [](hid_t creation) { H5Pset_alloc_time(creation, H5D_ALLOC_TIME_EARLY); };
  const Plan plans[] = {{{100}, {7}},                                      // B-tree or fixed array
                        {{100}, {100}},                                    // a single chunk
                        {{100, 6}, {9, 4}, {unlimited, 6}},                // extensible array
                        {{40, 50}, {7, 9}, {unlimited, unlimited}},        // B-tree of version 2
                        {.shape = {100}, .chunk = {7}, .filters = early},  // no index
                        {{20, 11, 13}, {1, 11, 13}},
                        {{20, 11, 13}, {3, 4, 5}},
                        {{5}, {64}, {unlimited}}};
  for (auto plan : plans)
    for (const auto version : {H5F_LIBVER_EARLIEST, H5F_LIBVER_V110})
      for (const hsize_t user_block : {0, 512, 2048}) {
        plan.oldest = version;
        plan.user_block = user_block;
        std::filesystem::remove(folder.file("a.h5"));
        const auto values = write(folder.file("a.h5"), plan);
        EXPECT_EQ(read(folder.file("a.h5")), values)
            << testing::PrintToString(plan.shape) << ", version " << version << ", user block " << user_block;
      }
}

TEST(Chunks, ThatWereNeverWrittenAreTold) {
  const Folder folder;
  const std::int32_t value = 0x01010101;
  const auto write_one = [&](hid_t dataset) {
    const hsize_t one = 1, row = 15;
    const Handle memory(H5Screate_simple(1, &one, nullptr), H5Sclose), space(H5Dget_space(dataset), H5Sclose);
    H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, &row, nullptr, &one, nullptr);
    H5Dwrite(dataset, H5T_NATIVE_INT32, memory.get(), space.get(), H5P_DEFAULT, &value);
  };
  const auto fill = [](hid_t creation) {
    const std::int32_t filled = 0x02020202;
    H5Pset_fill_value(creation, H5T_NATIVE_INT32, &filled);
  };
  for (const auto version : {H5F_LIBVER_EARLIEST, H5F_LIBVER_V110})
    for (const bool written : {false, true}) {
      Plan plan{.shape = {100}, .chunk = {10}, .filters = fill, .oldest = version};
      plan.write = written ? std::function<void(hid_t)>(write_one) : [](hid_t) {};
      std::filesystem::remove(folder.file("a.h5"));
      write(folder.file("a.h5"), plan);
      Bytes wanted(400, std::byte{2});
      if (written) std::fill_n(wanted.begin() + 60, 4, std::byte{1});
      EXPECT_EQ(read(folder.file("a.h5"), std::byte{2}), wanted) << version << written;
    }
}

TEST(Chunks, AreDecodedWithTheFiltersOfHdf5) {
  const Folder folder;
  const auto deflate = [](hid_t creation) { H5Pset_deflate(creation, 6); };
  const auto shuffle = [](hid_t creation) { H5Pset_shuffle(creation); };
  const auto checksum = [](hid_t creation) { H5Pset_fletcher32(creation); };
  const auto szip = [](hid_t creation) { H5Pset_szip(creation, H5_SZIP_NN_OPTION_MASK, 8); };
  std::vector<std::vector<std::function<void(hid_t)>>> pipelines{
      {deflate}, {shuffle}, {checksum}, {shuffle, deflate, checksum}, {checksum, shuffle, deflate}};
  if (decoder_of({.id = H5Z_FILTER_SZIP}) != nullptr && H5Zfilter_avail(H5Z_FILTER_SZIP) > 0)
    pipelines.push_back({szip, checksum});
  for (const auto& pipeline : pipelines)
    for (const hid_t type : {H5T_NATIVE_INT8, H5T_NATIVE_INT16, H5T_NATIVE_FLOAT, H5T_NATIVE_DOUBLE})
      for (const bool plain_edges : {false, true}) {
        Plan plan{.shape = {50, 21}, .chunk = {8, 10}, .type = type, .oldest = H5F_LIBVER_V110};
        plan.filters = [&](hid_t creation) {
          for (const auto& filter : pipeline) filter(creation);
          if (plain_edges) H5Pset_chunk_opts(creation, H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS);
        };
        std::filesystem::remove(folder.file("a.h5"));
        const auto values = write(folder.file("a.h5"), plan);
        EXPECT_EQ(read(folder.file("a.h5")), values) << plain_edges;
      }
}

TEST(Chunks, HaveFilterMasksOfTheirOwn) {
  const Folder folder;
  const std::vector<Filter> filters{{.id = H5Z_FILTER_SHUFFLE, .values = {4}},
                                    {.id = H5Z_FILTER_DEFLATE, .values = {6}},
                                    {.id = H5Z_FILTER_FLETCHER32}};
  std::mt19937_64 random(2);
  Bytes wanted;
  Plan plan{.shape = {80}, .chunk = {10}};
  plan.filters = [](hid_t creation) {
    H5Pset_shuffle(creation);
    H5Pset_deflate(creation, 6);
    H5Pset_fletcher32(creation);
  };
  plan.write = [&](hid_t dataset) {
    for (std::uint32_t mask = 0; mask < 8; ++mask) {
      const auto chunk = test::smooth_values(random, 10, 4);
      wanted.insert(wanted.end(), chunk.begin(), chunk.end());
      const auto stored = test::encoded(filters, mask, chunk);
      const hsize_t offset = mask * 10;
      check(H5Dwrite_chunk(dataset, H5P_DEFAULT, mask, &offset, stored.size(), stored.data()), "fixture");
    }
  };
  write(folder.file("a.h5"), plan);
  EXPECT_EQ(read(folder.file("a.h5")), wanted);
}

TEST(Chunks, ThatAreDamagedAreNamed) {
  const Folder folder;
  const auto with = [&](const std::function<void(hid_t)>& filters, Bytes stored) {
    Plan plan{.shape = {4, 20}, .chunk = {2, 10}, .filters = filters};
    plan.write = [&](hid_t dataset) {
      const Sizes offset{2, 10};
      check(H5Dwrite_chunk(dataset, H5P_DEFAULT, 0, offset.data(), stored.size(), stored.data()), "fixture");
    };
    std::filesystem::remove(folder.file("a.h5"));
    write(folder.file("a.h5"), plan);
    return message_of([&] { read(folder.file("a.h5")); });
  };
  const auto deflate = [](hid_t creation) { H5Pset_deflate(creation, 6); };
  const auto checksum = [](hid_t creation) { H5Pset_fletcher32(creation); };
  const auto shuffle = [](hid_t creation) { H5Pset_shuffle(creation); };
  EXPECT_EQ(with(deflate, Bytes(50)),
            "reading x, chunk (1, 1): its 50 stored bytes do not decode to 80 by deflate 6. "
            "The file is damaged; make or copy it again");
  EXPECT_NE(with(deflate, test::encoded({.id = H5Z_FILTER_DEFLATE}, Bytes(79))).find("do not decode to 80"),
            std::string::npos);
  EXPECT_NE(with(deflate, test::encoded({.id = H5Z_FILTER_DEFLATE}, Bytes(81))).find("do not decode to 80"),
            std::string::npos);
  EXPECT_NE(with(checksum, Bytes(84, std::byte{1})).find("its checksum is wrong. The file is damaged"),
            std::string::npos);
  EXPECT_NE(with(checksum, Bytes(3)).find("its checksum is wrong"), std::string::npos);
  EXPECT_NE(with(shuffle, Bytes(40)).find("its 40 stored bytes do not decode to 80"), std::string::npos);
  EXPECT_EQ(with(deflate, test::encoded({.id = H5Z_FILTER_DEFLATE}, Bytes(80))), "no error");
}

TEST(Chunks, BeyondTheEndOfTheFileAreNamed) {
  const Folder folder;
  const auto path = folder.file("a.h5");
  write(path, {.shape = {1000}, .chunk = {100}});
  const std::vector<std::int64_t> numbers{7}, others{6, 8};
  std::uint64_t address = 0;
  {
    const auto file = open_file(path);
    const auto dataset = open_dataset(file.get(), "x", "x");
    address = ChunkIndex(dataset.get(), "x").locate(numbers).front().offset;
  }
  const auto content = read_file(path);
  std::string stored(8, '\0');
  std::memcpy(stored.data(), &address, 8);
  const auto at = content.find(stored);
  ASSERT_NE(at, std::string::npos);
  // The last one and the size of a chunk add up to more than 64 bits, which HDF5 does not notice.
  for (const std::uint64_t forged : {content.size() - 8, std::size_t{1} << 62, ~std::size_t{0} - 100}) {
    auto damaged = content;
    std::memcpy(damaged.data() + at, &forged, 8);
    write_file(path, damaged);
    const auto file = open_file(path);
    const auto dataset = open_dataset(file.get(), "x", "x");
    const ChunkIndex index(dataset.get(), "x");
    const auto message = message_of([&] { index.locate(numbers); });
    EXPECT_NE(message.find("reading x: chunk (7) was not found: "), std::string::npos) << message;
    EXPECT_EQ(index.locate(others).back().bytes, 400);
  }
}

TEST(Chunks, OfADamagedIndexAreNamed) {
  const Folder folder;
  const auto path = folder.file("a.h5");
  write(path, {.shape = {1000}, .chunk = {100}});
  auto content = read_file(path);
  const auto node = content.rfind("TREE");  // the chunks' B-tree
  ASSERT_NE(node, std::string::npos);
  content.replace(node, 4, "DAMA");
  write_file(path, content);
  const auto file = open_file(path);
  const auto dataset = open_dataset(file.get(), "x", "x");
  const ChunkIndex index(dataset.get(), "x");
  const std::vector<std::int64_t> numbers{3};
  EXPECT_NE(message_of([&] { index.locate(numbers); }).find("reading x: chunk (3) was not found"), std::string::npos);
}

TEST(Chunks, OfAnotherNumberOfDimensionsAreRefused) {
  const Folder folder;
  const auto path = folder.file("a.h5");
  write(path, {.shape = {1000, 30}, .chunk = {101, 17}});
  const auto content = read_file(path);
  const std::string sizes("\x65\0\0\0\x11\0\0\0", 8);
  const auto at = content.find(sizes);
  ASSERT_NE(at, std::string::npos);
  ASSERT_EQ(content[at - 9], 3) << "the dimensions, and one for the size of a value";
  for (const char rank : {1, 2, 4}) {
    auto damaged = content;
    damaged[at - 9] = rank;
    write_file(path, damaged);
    EXPECT_NE(message_of([&] { read(path); }), "no error") << int{rank};
    EXPECT_NE(message_of([&] { Dataset(path).count(); }), "no error") << int{rank};
    const auto described = describe_dataset(path);
    EXPECT_TRUE(described.at("columns").empty()) << int{rank};
    EXPECT_EQ(described.at("advice").size(), 1u) << int{rank};
    if (rank > 1) {
      EXPECT_NE(described.dump().find("its chunks have not as many dimensions as its values"), std::string::npos);
    }
  }
}

TEST(Chunks, OfAFileOfAnotherDriverAreNotLocated) {
  const Folder folder;
  write(folder.file("a.h5"), {.shape = {10}, .chunk = {5}});
  const Handle file(H5Fopen(folder.file("a.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
  const auto dataset = open_dataset(file.get(), "x", "x");
  EXPECT_FALSE(ChunkIndex(dataset.get(), "x").locates());
}

}  // namespace
}  // namespace muster::detail::hdf5::chunks_test
