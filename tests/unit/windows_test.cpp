// Windows of arrays, compared with slices of the values in memory.
#include "data/sources/source.hpp"
#include "data/sources/window_grid.hpp"
#include "data/sources/window_mask.hpp"
#include "muster/dataset.hpp"
#include "muster/error.hpp"
#include "support/hdf5_fixture.hpp"
#include "support/io_errors.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace muster::windows_test {
namespace {

using detail::data::WindowGrid;
using detail::hdf5::check;
using detail::hdf5::Handle;
using test::Folder;
using test::H5File;
using Sizes = std::vector<std::int64_t>;

std::int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

Sizes all_of(const Dataset& data) {
  Sizes samples(static_cast<std::size_t>(data.count()));
  std::iota(samples.begin(), samples.end(), 0);
  return samples;
}

struct Storage {
  Sizes chunk = {};  ///< contiguous if empty
  unsigned deflate = 0;
  hid_t type = H5T_NATIVE_FLOAT;
};

/// Adds an array of 0, 1, 2, … and returns it.
at::Tensor add(H5File& file, const std::string& name, const Sizes& shape, const Storage& storage = {},
               std::int64_t begin = 0) {
  const detail::hdf5::Lock lock;
  const std::vector<hsize_t> sizes(shape.begin(), shape.end()), chunk(storage.chunk.begin(), storage.chunk.end());
  const auto rank = static_cast<int>(sizes.size());
  const Handle space(H5Screate_simple(rank, sizes.data(), nullptr), H5Sclose);
  const Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  if (!chunk.empty()) check(H5Pset_chunk(creation.get(), rank, chunk.data()), "fixture");
  if (storage.deflate > 0) check(H5Pset_deflate(creation.get(), storage.deflate), "fixture");
  auto values = at::arange(begin, begin + product(shape), at::kFloat).view(shape);
  file.create(name, storage.type, H5T_NATIVE_FLOAT, space.get(), creation.get(), values.const_data_ptr());
  return values;
}

std::string error_of(const std::vector<std::string>& variables, const WindowOptions& options, ExitCode code) {
  try {
    Dataset::windows(variables, options).count();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "no error";
}

Sizes counts_of(const Sizes& shape, const WindowOptions& options) {
  Sizes counts;
  for (std::size_t d = 0; d < shape.size(); ++d) counts.push_back((shape[d] - options.size[d]) / options.stride[d] + 1);
  return counts;
}

/// The part of an array that begins at `begin`, which may be beyond its ends.
at::Tensor slice(const at::Tensor& values, const Sizes& begin, const Sizes& size, double beyond) {
  auto window = at::full(size, beyond, values.options());
  auto from = values, into = window;
  for (std::size_t d = 0; d < size.size(); ++d) {
    const auto first = std::max<std::int64_t>(0, begin[d]);
    const auto count = std::min(values.size(static_cast<std::int64_t>(d)), begin[d] + size[d]) - first;
    from = from.narrow(static_cast<std::int64_t>(d), first, count);
    into = into.narrow(static_cast<std::int64_t>(d), first - begin[d], count);
  }
  into.copy_(from);
  return window;
}

TEST(Windows, AreTheSlicesOfTheArrayInEveryLayout) {
  std::mt19937 random(1);
  const auto upto = [&](std::int64_t most) {
    return 1 + static_cast<std::int64_t>(random() % static_cast<unsigned>(most));
  };
  for (int round = 0; round < 250; ++round) {
    Sizes shape, chunk;
    WindowOptions options;
    for (auto rank = upto(4); rank > 0; --rank) {
      shape.push_back(upto(14));
      chunk.push_back(upto(shape.back()));
      options.size.push_back(random() % 5 == 0 ? 0 : upto(shape.back()));
      options.stride.push_back(static_cast<std::int64_t>(random() % 6));
      options.margin.push_back(random() % 3 == 0 ? upto(shape.back()) : 0);
    }
    if (random() % 3 == 0) options.stride.clear();
    if (random() % 2 == 0) options.margin.clear();
    const Storage storages[] = {{}, {chunk}, {chunk, 1}, {chunk, 1, H5T_STD_I16BE}, {{}, 0, H5T_STD_I32BE}};
    const auto& storage = storages[round % 5];
    const bool is_float = storage.type == H5T_NATIVE_FLOAT;
    const Folder folder;
    at::Tensor values;
    {
      H5File file(folder.file("a.h5"));
      values = add(file, "x", shape, storage);
    }
    for (const std::int64_t cache : {0, 300, 1 << 20}) {
      options.cache_bytes = cache;
      const auto data = Dataset::windows({folder.file("a.h5") + ":/x"}, options);
      Sizes size = options.size, stride = options.stride, margin = options.margin, counts, extent;
      stride.resize(shape.size(), 0);
      margin.resize(shape.size(), 0);
      for (std::size_t d = 0; d < shape.size(); ++d) {
        if (size[d] == 0) size[d] = shape[d];
        if (stride[d] == 0) stride[d] = size[d];
        counts.push_back((shape[d] - size[d]) / stride[d] + 1);
        extent.push_back(size[d] + 2 * margin[d]);
      }
      ASSERT_EQ(data.count(), product(counts));
      auto samples = all_of(data);
      std::shuffle(samples.begin(), samples.end(), random);
      samples.resize(std::min<std::size_t>(samples.size(), 40));
      const auto batch = data.read(samples);
      ASSERT_EQ(batch["x"].sizes().slice(1), at::IntArrayRef(extent));
      EXPECT_EQ(batch["x"].scalar_type(), data.schema().front().dtype);
      std::set<Sizes> seen;
      for (std::int64_t i = 0; i < std::ssize(samples); ++i) {
        const auto row = batch["origin"][i];
        Sizes origin(row.data_ptr<std::int64_t>(), row.data_ptr<std::int64_t>() + shape.size());
        EXPECT_TRUE(seen.insert(origin).second);
        auto begin = origin;
        for (std::size_t d = 0; d < shape.size(); ++d) {
          EXPECT_EQ(origin[d] % stride[d], 0);
          begin[d] -= margin[d];
        }
        const auto wanted = slice(values, begin, extent, is_float ? std::numeric_limits<double>::quiet_NaN() : 0);
        EXPECT_TRUE(at::equal(batch["x"][i].to(at::kFloat).nan_to_num(-1), wanted.nan_to_num(-1)))
            << "layout " << round % 5 << ", shape " << at::IntArrayRef(shape);
      }
    }
  }
}

TEST(WindowGrid, NumbersEachWindowOnceAndTilesFirst) {
  std::mt19937 random(2);
  for (int round = 0; round < 400; ++round) {
    Sizes counts, tile;
    for (auto rank = 1 + random() % 4; rank > 0; --rank) {
      counts.push_back(1 + random() % 9);
      tile.push_back(1 + random() % 5);
    }
    const WindowGrid grid(counts, tile);
    std::set<Sizes> seen;
    for (std::int64_t number = 0; number < grid.size(); ++number) {
      const auto at = grid.coordinates(number);
      for (std::size_t d = 0; d < counts.size(); ++d) ASSERT_TRUE(0 <= at[d] && at[d] < counts[d]);
      EXPECT_TRUE(seen.insert(at).second);
      // Those of a whole tile follow one another.
      const auto first = grid.coordinates(number / grid.tile_size() * grid.tile_size());
      std::int64_t whole = 1;
      for (std::size_t d = 0; d < counts.size(); ++d) whole *= counts[d] / std::min(tile[d], counts[d]);
      for (std::size_t d = 0; d < counts.size() && number < whole * grid.tile_size(); ++d)
        EXPECT_EQ(at[d] / std::min(tile[d], counts[d]), first[d] / std::min(tile[d], counts[d]));
    }
    EXPECT_EQ(std::ssize(seen), grid.size());
  }
}

TEST(Windows, OfSeveralVariablesAreAligned) {
  const Folder folder;
  at::Tensor a, b;
  {
    H5File one(folder.file("a.h5")), two(folder.file("b.h5"));
    a = add(one, "u", {20, 30}, {{5, 7}, 1});
    b = add(two, "v", {20, 30}, {}, 5000);
  }
  const auto data = Dataset::windows({folder.file("a.h5") + ":/u", folder.file("b.h5") + ":/v"}, {.size = {4, 6}});
  ASSERT_EQ(data.count(), 25);
  const auto batch = data.read(all_of(data));
  EXPECT_EQ(batch.num_columns(), 3u);
  EXPECT_TRUE(at::equal(batch["u"].add(5000), batch["v"]));
}

TEST(Windows, AreLeftOutByAMask) {
  const Folder folder;
  at::Tensor values, mask;
  {
    H5File file(folder.file("a.h5"));
    values = add(file, "x", {40, 30}, {{8, 9}, 1});
    mask = at::full({40, 30}, 1, at::kFloat);
    mask.narrow(0, 10, 7).fill_(0);
    mask.narrow(1, 0, 3).fill_(std::numeric_limits<float>::quiet_NaN());
    const hsize_t sizes[] = {40, 30};
    const Handle space(H5Screate_simple(2, sizes, nullptr), H5Sclose);
    file.create("valid", H5T_IEEE_F32BE, H5T_NATIVE_FLOAT, space.get(), H5P_DEFAULT, mask.const_data_ptr());
  }
  const auto path = folder.file("a.h5") + ":";
  for (const double share : {0.3, 0.5, 1.0}) {
    const auto data = Dataset::windows(
        {path + "/x"}, {.size = {5, 4}, .stride = {3, 2}, .mask = path + "/valid", .mask_share = share});
    std::set<std::pair<std::int64_t, std::int64_t>> wanted, found;
    for (std::int64_t i = 0; i + 5 <= 40; i += 3)
      for (std::int64_t j = 0; j + 4 <= 30; j += 2) {
        const auto part = mask.narrow(0, i, 5).narrow(1, j, 4);
        if (part.nan_to_num(0).ne(0).sum().item<double>() >= share * 20) wanted.emplace(i, j);
      }
    const auto batch = data.read(all_of(data));
    for (std::int64_t i = 0; i < data.count(); ++i) {
      const auto at = batch["origin"][i];
      const std::pair place(at[0].item<std::int64_t>(), at[1].item<std::int64_t>());
      EXPECT_TRUE(found.insert(place).second);
      EXPECT_TRUE(at::equal(batch["x"][i], slice(values, {place.first, place.second}, {5, 4}, 0)));
    }
    EXPECT_EQ(found, wanted) << share;
  }
}

TEST(Windows, WithExactlyTheShareOfAMaskAreLeft) {
  const Folder folder;
  const auto path = folder.file("a.h5");
  {
    H5File file(path);
    add(file, "x", {5, 20});
    auto mask = std::vector<float>(100, 0);
    std::fill_n(mask.begin(), 55, 1.0F);
    file.dataset("valid", {5, 20}, H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, mask.data());
  }
  const auto with = [&](double share) {
    return Dataset::windows({path + ":/x"}, {.size = {5, 20}, .mask = path + ":/valid", .mask_share = share});
  };
  EXPECT_EQ(with(0.55).count(), 1);  // 0.55 × 100 is more than 55 in floating point
  EXPECT_THROW(with(0.56).count(), Error);
}

TEST(Windows, OfTilesReadEachChunkAFewTimes) {
  const Folder folder;
  {
    H5File file(folder.file("a.h5"));
    add(file, "x", {64, 64, 64}, {{8, 16, 16}, 1});
  }
  // A window of 4 × 8 × 8 values, side by side: each is inside of one chunk.
  const auto data =
      Dataset::windows({folder.file("a.h5") + ":/x"}, {.size = {4, 8, 8}, .cache_bytes = 16 * 8 * 16 * 16 * 4});
  const auto blocks = detail::data::source_of(data)->blocks();
  EXPECT_EQ(blocks.rows, 8);
  EXPECT_EQ(blocks.files, Sizes{8 * 8 * 16});
  // A tile may touch two chunks along each dimension, wherever it begins: that is what the memory must hold.
  EXPECT_EQ(blocks.lanes, 1);
  const test::IoError reads("preadv", "a.h5", 0);
  for (std::int64_t first = 0; first < data.count(); first += 8)
    data.read(Sizes{first, first + 1, first + 2, first + 3, first + 4, first + 5, first + 6, first + 7});
  EXPECT_EQ(reads.count(), 8 * 4 * 4) << "one for each chunk";
}

TEST(Windows, ChunksOfATileAreReadAhead) {
  const Folder folder;
  {
    H5File file(folder.file("a.h5"));
    add(file, "x", {64, 64}, {{16, 16}, 1});
  }
  const auto data = Dataset::windows({folder.file("a.h5") + ":/x"}, {.size = {8, 8}, .cache_bytes = 8 * 16 * 16 * 4});
  const auto source = detail::data::source_of(data);
  ASSERT_EQ(source->blocks().rows, 4);
  const test::IoError reads("preadv", "a.h5", 0);
  source->expect(Sizes{5}, detail::data::Ahead::decode);
  EXPECT_EQ(reads.count(), 1);
  data.read(Sizes{4, 5, 6, 7});
  EXPECT_EQ(reads.count(), 1);
}

/// The part of windows with gaps, margins and overlaps that a mask over some of their dimensions, in any order, leaves.
TEST(Windows, OfARandomMaskAreThoseOfThePlainReference) {
  std::mt19937 random(5);
  const auto upto = [&](std::int64_t most) {
    return 1 + static_cast<std::int64_t>(random() % static_cast<unsigned>(most));
  };
  for (int round = 0; round < 100; ++round) {
    Sizes shape, chunk, order;
    WindowOptions options;
    const auto rank = upto(3);
    for (std::int64_t d = 0; d < rank; ++d) {
      shape.push_back(upto(12));
      chunk.push_back(upto(shape.back()));
      options.size.push_back(upto(shape.back()));
      options.stride.push_back(upto(4));
      order.push_back(d);
    }
    std::shuffle(order.begin(), order.end(), random);
    order.resize(static_cast<std::size_t>(upto(rank)));
    Sizes mask_shape;
    std::vector<std::string> all_names, names;
    for (std::int64_t d = 0; d < rank; ++d) all_names.push_back("d" + std::to_string(d));
    for (const auto d : order) {
      mask_shape.push_back(shape[static_cast<std::size_t>(d)]);
      names.push_back(all_names[static_cast<std::size_t>(d)]);
    }
    const auto mask = at::rand(mask_shape).gt(0.3).to(at::kFloat);
    const Folder folder;
    {
      H5File file(folder.file("a.h5"));
      add(file, "x", shape, {round % 2 == 0 ? Sizes{} : chunk, 1u * (round % 4 == 1)});
      const std::vector<hsize_t> sizes(mask_shape.begin(), mask_shape.end());
      file.dataset("m", sizes, round % 3 == 0 ? H5T_STD_I8LE : H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT,
                   mask.const_data_ptr());
      file.name_dimensions("x", all_names);
      file.name_dimensions("m", names);
    }
    options.mask = folder.file("a.h5") + ":/m";
    options.mask_share = 0.25 * static_cast<double>(upto(4));
    if (random() % 2 == 0) options.cache_bytes = 100;

    std::set<Sizes> wanted, found;
    const WindowGrid grid(counts_of(shape, options), Sizes(shape.size(), 1));
    for (std::int64_t number = 0; number < grid.size(); ++number) {
      auto begin = grid.coordinates(number);
      for (std::size_t d = 0; d < begin.size(); ++d) begin[d] *= options.stride[d];
      auto part = mask;
      for (std::size_t i = 0; i < order.size(); ++i) {
        const auto d = static_cast<std::size_t>(order[i]);
        part = part.narrow(static_cast<std::int64_t>(i), begin[d], options.size[d]);
      }
      if (part.sum().item<double>() >= options.mask_share * static_cast<double>(part.numel())) wanted.insert(begin);
    }
    const auto data = Dataset::windows({folder.file("a.h5") + ":/x"}, options);
    if (wanted.empty()) {
      EXPECT_THROW(data.count(), Error);
      continue;
    }
    const auto origins = data.read(all_of(data))["origin"];
    for (std::int64_t i = 0; i < data.count(); ++i) {
      const auto* const row = origins[i].const_data_ptr<std::int64_t>();
      EXPECT_TRUE(found.emplace(row, row + rank).second);
    }
    EXPECT_EQ(found, wanted);
    for (std::int64_t i = 0; i < data.count(); i += 3)
      detail::data::source_of(data)->expect(Sizes{i}, detail::data::Ahead::decode);
  }
}

TEST(NumberSet, FindsItsNumbers) {
  std::mt19937 random(6);
  for (int round = 0; round < 50; ++round) {
    const auto limit = 1 + static_cast<std::int64_t>(random() % 3000);
    const auto share = random() % 100;
    detail::data::NumberSet set(limit);
    Sizes numbers;
    for (std::int64_t number = 0; number < limit; ++number) {
      if (random() % 100 > share || (number > 700 && number < 2100)) continue;
      set.add(number);
      numbers.push_back(number);
    }
    ASSERT_EQ(set.size(), std::ssize(numbers));
    for (std::int64_t i = 0; i < set.size(); ++i) ASSERT_EQ(set[i], numbers[static_cast<std::size_t>(i)]);
  }
}

TEST(Windows, OfARepeatedDimensionAreAlignedOneByOne) {
  const Folder folder;
  at::Tensor a, b;
  {
    H5File file(folder.file("a.h5"));
    a = add(file, "cov", {8, 8});
    b = add(file, "other", {8, 8}, {{3, 3}, 1}, 100);
    add(file, "row", {8});
    file.name_dimensions("cov", {"x", "x"});
    file.name_dimensions("other", {"x", "x"});
    file.name_dimensions("row", {"x"});
  }
  const auto at = [&](const std::string& name) { return folder.file("a.h5") + ":/" + name; };
  const auto data = Dataset::windows({at("cov"), at("other")}, {.size = {2, 4}, .mask = at("other"), .mask_share = 1});
  const auto batch = data.read(all_of(data));
  EXPECT_EQ(data.count(), 8);
  EXPECT_TRUE(at::equal(batch["cov"].add(100), batch["other"]));
  EXPECT_NE(error_of({at("cov"), at("row")}, {.size = {2, 4}}, ExitCode::data).find("a repeated dimension as often"),
            std::string::npos);
}

TEST(Windows, WhoseDimensionsNothingTellsApartAreRefused) {
  const Folder folder;
  {
    H5File file(folder.file("a.h5")), named(folder.file("b.h5"));
    for (const std::string name : {"t", "height"}) {
      add(file, name, {6, 6});
      add(file, name + "_thin", {1, 6, 1});
      add(named, name, {6, 6});
    }
    named.name_dimensions("t", {"latitude", "longitude"});
    named.name_dimensions("height", {"longitude", "latitude"});
  }
  const auto plain = folder.file("a.h5") + ":/", named = folder.file("b.h5") + ":/";
  const WindowOptions options{.size = {2, 3}};
  for (const auto& variables : std::vector<std::vector<std::string>>{
           {plain + "t", plain + "height"}, {named + "t", plain + "height"}, {plain + "t", named + "height"}}) {
    EXPECT_NE(error_of(variables, options, ExitCode::data).find("Name the dimensions of both"), std::string::npos);
    const WindowOptions masked{.size = {2, 3}, .mask = variables[1]};
    EXPECT_NE(error_of({variables[0]}, masked, ExitCode::data).find("Name the dimensions of both"), std::string::npos);
  }
  EXPECT_EQ(Dataset::windows({plain + "t"}, {.size = {2, 3}, .mask = plain + "t", .mask_share = 0.5}).count(), 6)
      << "a variable goes with itself";
  EXPECT_EQ(Dataset::windows({plain + "t_thin", plain + "height_thin"}, {.size = {1, 2, 1}}).count(), 3);
  const auto data = Dataset::windows({named + "t", named + "height"}, options);
  const auto batch = data.read(all_of(data));
  EXPECT_TRUE(at::equal(batch["t"][5], at::tensor({27.F, 28.F, 29.F, 33.F, 34.F, 35.F}).view({2, 3})));
  EXPECT_TRUE(at::equal(batch["height"][5], at::tensor({22.F, 23.F, 28.F, 29.F, 34.F, 35.F}).view({3, 2})));
}

TEST(Windows, OfArraysWithAnotherClassNeedNoNames) {
  const Folder folder;
  {
    H5File file(folder.file("a.h5"));
    for (const std::string name : {"a", "b"}) {
      add(file, name, {10});
      const detail::hdf5::Lock lock;
      const Handle type(H5Tcopy(H5T_C_S1), H5Tclose), space(H5Screate(H5S_SCALAR), H5Sclose);
      H5Tset_size(type.get(), 5);
      const Handle array(H5Dopen2(file.id(), name.c_str(), H5P_DEFAULT), H5Dclose);
      const Handle made(H5Acreate2(array.get(), "CLASS", type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
      check(H5Awrite(made.get(), type.get(), "ARRAY"), "fixture");
    }
  }
  const auto data = Dataset::windows({folder.file("a.h5") + ":/a", folder.file("a.h5") + ":/b"}, {.size = {5}});
  const auto batch = data.read(all_of(data));
  EXPECT_TRUE(at::equal(batch["a"], batch["b"]));
}

TEST(Windows, OfAFieldOfCompoundsThatDoesNotFitReadEachChunkAFewTimes) {
  struct Point {
    float u, v;
  };
  const Folder folder;
  std::vector<Point> points(64 * 64);
  for (std::size_t i = 0; i < points.size(); ++i) points[i] = {static_cast<float>(i), -static_cast<float>(i)};
  {
    H5File file(folder.file("a.h5"));
    const detail::hdf5::Lock lock;
    const Handle type(H5Tcreate(H5T_COMPOUND, sizeof(Point)), H5Tclose),
        creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Tinsert(type.get(), "u", offsetof(Point, u), H5T_NATIVE_FLOAT);
    H5Tinsert(type.get(), "v", offsetof(Point, v), H5T_NATIVE_FLOAT);
    const hsize_t sizes[] = {64, 64}, chunk[] = {16, 16};
    const Handle space(H5Screate_simple(2, sizes, nullptr), H5Sclose);
    check(H5Pset_chunk(creation.get(), 2, chunk), "fixture");
    check(H5Pset_deflate(creation.get(), 1), "fixture");
    file.create("p", type.get(), type.get(), space.get(), creation.get(), points.data());
  }
  // Two tiles of both fields fit: four chunks of 16 × 16 × 8 bytes each.
  const auto path = folder.file("a.h5") + ":/p";
  const auto data = Dataset::windows({path + ".u", path + ".v"}, {.size = {4, 4}, .cache_bytes = 16 * 16 * 16 * 8 / 2});
  const auto source = detail::data::source_of(data);
  ASSERT_EQ(source->blocks().rows, 16);
  const test::IoError reads("pread", "a.h5", 0);
  for (std::int64_t first = 0; first < data.count(); first += 4) {
    const auto batch = data.read(Sizes{first, first + 1, first + 2, first + 3});
    EXPECT_TRUE(at::equal(batch["p.u"], batch["p.v"].neg()));
    const auto origin = batch["origin"][3];
    const auto row = origin[0].item<std::int64_t>(), column = origin[1].item<std::int64_t>();
    EXPECT_EQ(batch["p.u"][3][0][0].item<float>(), static_cast<float>(row * 64 + column));
  }
  EXPECT_GE(reads.count(), 16);
  EXPECT_LE(reads.count(), 24) << "16 chunks, and what HDF5 reads of the index";
}

TEST(Windows, ThatFitNowGoOnInThePassOfAnotherCache) {
  const Folder folder;
  {
    H5File file(folder.file("a.h5"));
    add(file, "x", {64, 64}, {{16, 16}, 1});
  }
  const auto data = Dataset::windows({folder.file("a.h5") + ":/x"}, {.size = {8, 8}});
  const auto source = detail::data::source_of(data);
  EXPECT_EQ(source->blocks().rows, 0);
  source->expect(Sizes{0, 5}, detail::data::Ahead::decode);
  EXPECT_EQ(data.read(Sizes{5})["x"].size(0), 1);
}

TEST(Windows, ShortPiecesAtTheEdgesOfLargeChunksAreReadAlone) {
  const Folder folder;
  at::Tensor values;
  {
    H5File file(folder.file("a.h5"));
    values = add(file, "x", {512, 1024}, {{512, 512}});  // 1 MB each, without filters
  }
  const auto data = Dataset::windows({folder.file("a.h5") + ":/x"}, {.size = {8, 128}, .stride = {8, 100}});
  // Columns 400 … 527: 112 of the first chunk and 16, 64 bytes, of the second one.
  const test::IoError whole("preadv", "a.h5", 0);
  bool is_found = false;
  for (std::int64_t i = 0; i < data.count() && !is_found; ++i) {
    const auto batch = data.read(Sizes{i});
    is_found = batch["origin"][0][1].item<std::int64_t>() == 400;
    if (!is_found) continue;
    EXPECT_TRUE(at::equal(batch["x"][0], values.narrow(0, 0, 8).narrow(1, 400, 128)));
  }
  ASSERT_TRUE(is_found);
  EXPECT_GE(whole.count(), 16) << "eight rows of two chunks";
}

TEST(Windows, OfACoordinateOfTwoDimensionsHaveNames) {
  const Folder folder;
  {
    H5File file(folder.file("a.h5"));
    for (const std::string name : {"time", "t", "bounds"}) add(file, name, {6, 2});
    for (const auto& [name, number] : {std::pair("nv", 1), std::pair("x", 2)}) {
      file.only_dimension(name, 2);
      file.numbers_attribute(name, "_Netcdf4Dimid", {number});
    }
    file.make_scale("time", {0, 1});
    file.name_dimensions("t", {"time", "x"});
    file.name_dimensions("bounds", {"time", "nv"});
  }
  const auto at = [&](const std::string& name) { return folder.file("a.h5") + ":/" + name; };
  const WindowOptions options{.size = {2, 2}};
  for (const auto& variables : std::vector<std::vector<std::string>>{{at("time"), at("t")}, {at("t"), at("time")}})
    EXPECT_NE(error_of(variables, options, ExitCode::data).find("(time 6, nv 2)"), std::string::npos);
  EXPECT_EQ(Dataset::windows({at("time"), at("bounds")}, options).count(), 3);
}

TEST(Windows, RefuseWhatDoesNotFit) {
  const Folder folder;
  {
    H5File file(folder.file("a.h5"));
    add(file, "x", {10, 20});
    add(file, "y", {10, 21});
    add(file, "z", {10});
    add(file, "origin", {10, 20});
    add(file, "nothing", {0, 20});
    const std::uint64_t large[] = {1, std::uint64_t{1} << 63};
    file.dataset("large", {2}, H5T_STD_U64LE, H5T_NATIVE_UINT64, large);
    const float value = 1;
    file.dataset("single", {}, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, &value);
  }
  const auto at = [&](const std::string& name) { return folder.file("a.h5") + ":/" + name; };
  const auto expect = [&](const std::vector<std::string>& variables, const WindowOptions& options,
                          const std::string& words, ExitCode code = ExitCode::data) {
    EXPECT_NE(error_of(variables, options, code).find(words), std::string::npos) << error_of(variables, options, code);
  };
  const WindowOptions fits{.size = {2, 2}};
  expect({}, fits, "there are no variables");
  expect({folder.file("a.h5")}, fits, "no variable is named");
  expect({at("x")}, {.size = {2}}, "size has 1 numbers, the variable has 2 dimensions", ExitCode::usage);
  expect({at("x")}, {.size = {2, 2}, .stride = {1}}, "stride has 1 numbers", ExitCode::usage);
  expect({at("x")}, {.size = {2, 2}, .margin = {1, 1, 1}}, "margin has 3 numbers", ExitCode::usage);
  expect({at("x")}, {.size = {2, -2}}, "negative along dimension 1", ExitCode::usage);
  expect({at("x")}, {.size = {11, 2}}, "a window has 11 values along dimension 0, the variable 10");
  expect({at("x")}, {.size = {2, 2}, .margin = {11, 0}}, "a margin has 11 values along dimension 0", ExitCode::usage);
  expect({at("nothing")}, {.size = {0, 2}}, "a window has 0 values along dimension 0");
  expect({at("single")}, {.size = {}}, "a single value");
  expect({at("x"), at("y")}, fits, "its dimensions are (10, 21), those of");
  expect({at("x"), at("z")}, fits, "must have the same shape");
  expect({at("x"), at("x")}, fits, "two columns \"x\"");
  expect({at("origin")}, fits, "two columns \"origin\"");
  expect({at("x")}, {.size = {2, 2}, .mask = at("nowhere")}, "nowhere");
  expect({at("x")}, {.size = {2, 2}, .mask = at("x"), .mask_share = 0}, "mask_share", ExitCode::usage);
  expect({at("x")}, {.size = {10, 20}, .mask = at("x")}, "the mask leaves no window");
  const auto large = Dataset::windows({at("large")}, {.size = {1}});
  EXPECT_EQ(large.read(Sizes{0})["large"].item<std::int64_t>(), 1);
  EXPECT_THROW(large.read(Sizes{1}), Error);
}

}  // namespace
}  // namespace muster::windows_test
