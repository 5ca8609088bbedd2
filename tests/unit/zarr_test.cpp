// Zarr stores that are written here by hand. tests/peer/zarr has those of other programs, with all codecs.
#include "data/sources/chunk_reader.hpp"
#include "data/sources/source.hpp"
#include "muster/convert.hpp"
#include "muster/dataset.hpp"
#include "muster/error.hpp"
#include "support/errors.hpp"
#include "support/folder.hpp"
#include "unit/pass_world.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

namespace muster::zarr_test {
namespace {

namespace fs = std::filesystem;
using detail::data::pass_world::World;
using test::error_of;
using test::Folder;
using Sizes = std::vector<std::int64_t>;

void write(const fs::path& file, const std::string& content) {
  fs::create_directories(file.parent_path());
  std::ofstream(file, std::ios::binary) << content;
}

std::string zlib(const std::string& bytes) {
  std::string packed(::compressBound(bytes.size()), '\0');
  uLongf length = packed.size();
  ::compress(reinterpret_cast<Bytef*>(packed.data()), &length, reinterpret_cast<const Bytef*>(bytes.data()),
             bytes.size());
  packed.resize(length);
  return packed;
}

Json array_of_version_2(const Sizes& shape, const Sizes& chunk, const Json& more = {}) {
  Json array{{"zarr_format", 2}, {"shape", shape}, {"chunks", chunk},    {"dtype", "<i4"},
             {"fill_value", 7},  {"order", "C"},   {"filters", nullptr}, {"compressor", nullptr}};
  if (more.is_object()) array.update(more);
  return array;
}

Json array_of_version_3(const Sizes& shape, const Sizes& chunk, const Json& more = {}) {
  Json array{{"zarr_format", 3},
             {"node_type", "array"},
             {"shape", shape},
             {"data_type", "int32"},
             {"chunk_grid", {{"name", "regular"}, {"configuration", {{"chunk_shape", chunk}}}}},
             {"chunk_key_encoding", {{"name", "default"}}},
             {"fill_value", 7},
             {"codecs", Json::array({{{"name", "bytes"}, {"configuration", {{"endian", "little"}}}}})}};
  if (more.is_object()) array.update(more);
  return array;
}

/// The bytes of values as int32, of the chunk that begins at these rows; rows beyond the end are 0.
std::string chunk_bytes(const at::Tensor& values, std::int64_t first, std::int64_t rows) {
  auto chunk = at::zeros({rows, values.size(1)}, at::kInt);
  const auto here = std::min(rows, values.size(0) - first);
  chunk.narrow(0, 0, here).copy_(values.narrow(0, first, here));
  return {static_cast<const char*>(chunk.const_data_ptr()), chunk.nbytes()};
}

/// A store with a column x of [rows, 3] packed by zlib, and y [rows], the samples' numbers. Returns x.
at::Tensor write_store(const fs::path& store, std::int64_t rows, std::int64_t chunk) {
  const auto x = at::arange(rows * 3, at::kInt).view({rows, 3});
  write(store / ".zgroup", R"({"zarr_format": 2})");
  write(store / "x/.zarray", array_of_version_2({rows, 3}, {chunk, 3}, {{"compressor", {{"id", "zlib"}}}}).dump());
  write(store / "y/.zarray", array_of_version_2({rows}, {chunk}).dump());
  const auto y = at::arange(rows, at::kInt).view({rows, 1});
  for (std::int64_t first = 0; first < rows; first += chunk) {
    write(store / ("x/" + std::to_string(first / chunk) + ".0"), zlib(chunk_bytes(x, first, chunk)));
    write(store / ("y/" + std::to_string(first / chunk)), chunk_bytes(y, first, chunk));
  }
  return x;
}

void expect_text(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text << "\nwithout: " << part;
}

TEST(Zarr, PassesSplitsAndResumesAreThoseOfAnyDataset) {
  const Folder folder;
  const auto x = write_store(folder.path() / "s.zarr", 103, 8);
  const auto path = (folder.path() / "s.zarr").string();
  using namespace detail::data::pass_world;
  // All in memory, and in lanes of chunks.
  for (const std::int64_t cache : {std::int64_t{1} << 30, std::int64_t{1} << 10}) {
    const auto data = Dataset::from_hdf5({path}, {.cache_bytes = cache});
    EXPECT_EQ(detail::data::source_of(data)->blocks().rows, cache > 4096 ? 0 : 8);
    EXPECT_TRUE(at::equal(data.column("x"), x));
    for (const bool shuffle : {false, true})
      for (const int size : {1, 2, 3})
        for (const int later : {1, 2, 4}) {
          const BatchOptions options{.batch_size = 5, .shuffle = shuffle};
          Json position;
          auto samples = run(World(data, size), options, 3, &position);
          World resumed(data, later);
          for (const auto& state : resumed.states) state->restore(position);
          const auto rest = run(resumed, options);
          samples.insert(samples.end(), rest.begin(), rest.end());
          EXPECT_EQ(sorted(samples), indices(103)) << cache << " " << shuffle << " " << size << " " << later;
        }
    auto parts = data.random_split({0.5, 0.5}, 3);
    auto both = samples_in(World(parts[0], 1).shard().iter_batches({.shuffle = true}));
    const auto other = samples_in(World(parts[1], 1).shard().iter_batches());
    both.insert(both.end(), other.begin(), other.end());
    EXPECT_EQ(sorted(both), indices(103));
  }
}

TEST(Zarr, SeveralStoresAndHdf5FilesAreOneDataset) {
  const Folder folder;
  const auto a = write_store(folder.path() / "a.zarr", 10, 4), b = write_store(folder.path() / "b.zarr", 7, 8);
  convert_zarr({folder.path() / "b.zarr"}, folder.path() / "b.h5");
  const auto all = Dataset::from_hdf5({(folder.path() / "a.zarr").string(), (folder.path() / "b.zarr").string(),
                                       (folder.path() / "b.h5").string() + ":/"});
  EXPECT_TRUE(at::equal(all.column("x"), at::cat({a, b, b})));
}

TEST(Zarr, TheFingerprintCoversMetadataAndSizes) {
  const Folder folder;
  const auto print = [&](const std::string& name) {
    const Dataset data(folder.path() / name);
    return detail::data::source_of(data)->fingerprint().to_json();
  };
  write_store(folder.path() / "a/s.zarr", 40, 8);
  const auto first = print("a/s.zarr");
  const auto copy = [&](const std::string& name) {
    fs::create_directories(folder.path() / name);
    fs::copy(folder.path() / "a/s.zarr", folder.path() / name / "s.zarr", fs::copy_options::recursive);
    return folder.path() / name / "s.zarr";
  };
  const auto digest = [](const Json& print) {  // without the paths
    Json parts = Json::array();
    for (const auto& part : print[2]) parts.push_back({part[1], part[2]});
    return parts;
  };
  copy("same");
  EXPECT_EQ(digest(print("same/s.zarr")), digest(first));
  write(copy("longer") / "x/1.0", zlib(std::string(96, 'a')) + "b");
  EXPECT_NE(digest(print("longer/s.zarr")), digest(first));
  fs::remove(copy("missing") / "y/2");
  EXPECT_NE(digest(print("missing/s.zarr")), digest(first));
  write(copy("scaled") / "x/.zattrs", R"({"scale_factor": 2})");
  EXPECT_NE(digest(print("scaled/s.zarr")), digest(first));
  // What no column needs does not count.
  write(copy("more") / "g/.zgroup", R"({"zarr_format": 2})");
  EXPECT_EQ(digest(print("more/s.zarr")), digest(first));
}

TEST(Zarr, MissingChunksHaveTheFillValueAndAppearWhenWritten) {
  const Folder folder;
  const auto store = folder.path() / "s.zarr";
  auto x = write_store(store, 20, 8).clone();
  fs::rename(store / "x/1.0", folder.path() / "kept");
  const auto whole = x.clone();
  x.narrow(0, 8, 8).fill_(7);
  EXPECT_TRUE(at::equal(Dataset(store).column("x"), x));
  const auto uncached = Dataset::from_hdf5({store.string()}, {.cache_bytes = 0});
  EXPECT_TRUE(at::equal(uncached.column("x"), x));
  fs::rename(folder.path() / "kept", store / "x/1.0");
  EXPECT_TRUE(at::equal(uncached.column("x"), whole)) << "a store that is being written";
}

TEST(Zarr, ADamagedChunkIsNamed) {
  const Folder folder;
  const auto store = folder.path() / "s.zarr";
  write_store(store, 20, 8);
  const auto read = [&] { Dataset(store).column("x"); };
  const auto packed = zlib(std::string(96, 'a'));
  for (const auto& [content, fact] : std::vector<std::pair<std::string, std::string>>{
           {packed.substr(0, 5), "stored bytes do not decode to 96 by zlib"},
           {zlib(std::string(97, 'a')), "do not decode to 96"},
           {zlib(std::string(95, 'a')), "do not decode to 96"},
           {std::string(1 << 20, 'a'), "stored bytes are more than its values can take"},
           {"", "its 0 stored bytes do not decode"}}) {
    write(store / "x/1.0", content);
    const auto text = error_of(read);
    expect_text(text, fact);
    expect_text(text, store.string() + ":/x, chunk (1, 0) in 1.0");
  }
  fs::remove(store / "x/1.0");
  fs::create_directory(store / "x/1.0");
  expect_text(error_of(read), "it is a folder or a device, and no file");
}

TEST(Zarr, ReadsInOrderDecodeTheNextChunksToo) {
  const Folder folder;
  const auto store = folder.path() / "s.zarr";
  const auto x = write_store(store, 40, 8);
  write(store / "x/3.0", "damaged");
  const auto data = Dataset::from_hdf5({store.string()}, {.columns = {"x"}});
  const auto expect_chunk = [&](std::int64_t number) {
    std::vector<std::int64_t> rows(8);
    std::iota(rows.begin(), rows.end(), 8 * number);
    EXPECT_TRUE(at::equal(data.read(rows)["x"], x.narrow(0, 8 * number, 8))) << number;
  };
  expect_chunk(0);
  expect_chunk(1);
  if (detail::data::decoding_threads() > 0) fs::remove(store / "x/2.0");
  expect_chunk(2);
  expect_text(error_of([&] { expect_chunk(3); }), "chunk (3, 0) in 3.0: its 7 stored bytes do not decode");
  expect_chunk(4);
}

TEST(Zarr, LinksAreNotFollowed) {
  const Folder folder;
  const auto store = folder.path() / "s.zarr";
  write_store(store, 20, 8);
  fs::rename(store / "x/1.0", folder.path() / "outside");
  fs::create_symlink(folder.path() / "outside", store / "x/1.0");
  expect_text(error_of([&] { Dataset(store).column("x"); }),
              "it is a link, or lies behind one or behind a file; links in a store are not followed");
  EXPECT_EQ(Dataset::from_hdf5({store.string()}, {.columns = {"y"}}).count(), 20);
  fs::create_symlink(store / "y", store / "z");
  expect_text(error_of([&] { Dataset::from_hdf5({store.string()}, {.columns = {"z"}}).count(); }),
              "it is a link, or lies behind one");
  // The store itself may be one.
  fs::create_directory_symlink(store, folder.path() / "link.zarr");
  EXPECT_EQ(Dataset::from_hdf5({(folder.path() / "link.zarr").string()}, {.columns = {"y"}}).count(), 20);
}

TEST(Zarr, WhatMusterCannotReadIsNamed) {
  const Folder folder;
  const auto bytes = [](const Json& codec) {
    return Json::array({{{"name", "bytes"}, {"configuration", {{"endian", "little"}}}}, codec});
  };
  const auto shards = [&](const Json& more) {
    Json options{{"chunk_shape", {2, 3}},
                 {"codecs", Json::array({{{"name", "bytes"}}})},
                 {"index_codecs", Json::array({{{"name", "bytes"}, {"configuration", {{"endian", "little"}}}}})}};
    if (more.is_object()) options.update(more);
    return Json::array({{{"name", "sharding_indexed"}, {"configuration", options}}});
  };
  const Sizes shape{8, 3}, chunk{4, 3};
  const std::vector<std::pair<Json, std::string>> cases{
      {array_of_version_2(shape, chunk, {{"dtype", "|S5"}}), "it holds strings"},
      {array_of_version_2(shape, chunk, {{"dtype", "|O"}}), "it holds objects"},
      {array_of_version_2(shape, chunk, {{"dtype", Json::array({Json::array({"a", "<i4"})})}}), "compound values"},
      {array_of_version_2(shape, chunk, {{"dtype", "<M8[ns]"}}), "dates (datetime64)"},
      {array_of_version_2(shape, chunk, {{"dtype", "<f16"}}), "values of type <f16"},
      {array_of_version_2(shape, chunk, {{"dtype", 3}}), "values of type 3"},
      {array_of_version_2(shape, chunk, {{"fill_value", "x"}}), "its fill value, \"x\", is no number of its type"},
      {array_of_version_2(shape, chunk, {{"fill_value", 1e30}}), "is no number of its type"},
      {array_of_version_2(shape, chunk, {{"compressor", {{"id", "lzma"}}}}),
       "it is encoded by a codec that muster does not know (lzma)"},
      {array_of_version_2(shape, chunk, {{"compressor", {{"id", "blosc"}, {"cname", "lzo"}}}}),
       "it is compressed by a codec that muster was built without here (blosc lzo)"},
      {array_of_version_2(shape, chunk, {{"filters", {{{"id", "zlib"}}}}, {"compressor", {{"id", "zlib"}}}}),
       "it is compressed twice"},
      {array_of_version_2(shape, chunk, {{"filters", {{{"id", "delta"}, {"dtype", "<f8"}}}}}),
       "its codec delta is not for values of its type"},
      {array_of_version_2(shape, chunk, {{"filters", {{{"id", "shuffle"}, {"elementsize", 0}}}}}),
       "its codec shuffle has values of 0 bytes"},
      {array_of_version_2(shape, {4}), "its chunks have 1 dimensions, its values 2"},
      {array_of_version_2(shape, {4, 0}), "the shape of its chunks is [4,0]"},
      {array_of_version_2({8, -3}, chunk), "its shape is [8,-3]"},
      {array_of_version_2(shape, {std::int64_t{1} << 40, std::int64_t{1} << 40}), "is larger than any memory"},
      {array_of_version_2(shape, {std::int64_t{1} << 20, std::int64_t{1} << 12}), "the most are 4 GB"},
      {array_of_version_2(Sizes(33, 1), Sizes(33, 1)), "it has 33 dimensions; the most are 32"},
      {array_of_version_2(shape, chunk, {{"dimension_separator", "#"}}), "its chunk keys have the separator \"#\""},
      {array_of_version_2(shape, chunk, {{"dimension_separator", 1}}), "are not as Zarr's specification says"},
      {array_of_version_2(shape, chunk, {{"zarr_format", 4}}), "its zarr_format is not 2"},
      {array_of_version_3(shape, chunk, {{"node_type", "table"}}), "describes no array or group of version 3"},
      {array_of_version_3(shape, chunk, {{"new_thing", 1}}), "it needs the extension new_thing"},
      {array_of_version_3(shape, chunk, {{"storage_transformers", {1}}}),
       "it needs storage transformers, which muster does not know"},
      {array_of_version_3(shape, chunk, {{"chunk_grid", {{"name", "rectilinear"}}}}),
       "it needs a grid of chunks rectilinear"},
      {array_of_version_3(shape, chunk, {{"chunk_key_encoding", "fancy"}}), "it needs chunk keys fancy"},
      {array_of_version_3(shape, chunk, {{"codecs", bytes({{"name", "bytes"}})}}), "it is made bytes twice"},
      {array_of_version_3(shape, chunk,
                          {{"codecs", bytes({{"name", "transpose"}, {"configuration", {{"order", {1, 0}}}}})}}),
       "it is transposed after it was made bytes"},
      {array_of_version_3(shape, chunk,
                          {{"codecs", Json::array({{{"name", "transpose"}, {"configuration", {{"order", {1, 1}}}}}})}}),
       "its transpose is not an order of its dimensions"},
      {array_of_version_3(
           shape, chunk,
           {{"codecs", Json::array({{{"name", "transpose"}, {"configuration", {{"order", Json::array()}}}}})}}),
       "its transpose is not an order of its dimensions"},
      {array_of_version_3(shape, chunk, {{"codecs", shards({{"chunk_shape", {3, 3}}})}}),
       "it has shards that are no multiple of its chunks"},
      {array_of_version_3(shape, chunk, {{"codecs", shards({{"index_location", "middle"}})}}),
       "it has shards whose index lies at \"middle\""},
      {array_of_version_3(shape, chunk, {{"codecs", shards({{"index_codecs", {{{"name", "zstd"}}}}})}}),
       "it has shards whose index is compressed"},
      {array_of_version_3(shape, chunk, {{"codecs", shards({{"codecs", shards({})}})}}),
       "it has shards inside of shards"},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const auto& [array, text] = cases[i];
    const auto store = folder.path() / (std::to_string(i) + ".zarr");
    const bool is_2 = array.contains("dtype");
    write(store / (is_2 ? ".zgroup" : "zarr.json"),
          is_2 ? R"({"zarr_format": 2})" : R"({"zarr_format": 3, "node_type": "group"})");
    write(store / (is_2 ? "x/.zarray" : "x/zarr.json"), array.dump());
    const auto error = error_of([&] { Dataset::from_hdf5({store.string()}, {.columns = {"x"}}).count(); });
    expect_text(error, text);
    expect_text(error, store.string() + ":/x");
  }
  // Shards that have codecs, and what is no store.
  auto codecs = shards({});
  codecs.push_back({{"name", "crc32c"}});
  const auto store = folder.path() / "more.zarr";
  write(store / "zarr.json", R"({"zarr_format": 3, "node_type": "group"})");
  write(store / "x/zarr.json", array_of_version_3(shape, chunk, {{"codecs", codecs}}).dump());
  expect_text(error_of([&] { Dataset(store).count(); }), "it has shards that have codecs themselves");
  write(store / "x/zarr.json", "[1]");
  expect_text(error_of([&] { Dataset(store).count(); }), "zarr.json is no JSON object");
  write(store / "zarr.json", "{");
  expect_text(error_of([&] { Dataset(store).count(); }), store.string());
  fs::resize_file(store / "zarr.json", (16 << 20) + 1);
  expect_text(error_of([&] { Dataset(store).count(); }), "zarr.json has more than 16 MiB, and metadata are short");
  write(folder.path() / "no.zip", "PK\3\4 and no more");
  expect_text(error_of([&] { Dataset(folder.path() / "no.zip").count(); }), "it is not a whole zip archive");
}

/// A record of a zip archive, as its directory has it.
struct Record {
  std::string name, content;
  std::uint16_t method = 0;  // 8: deflate
  std::uint32_t size = 0;    // unpacked; 0: that of the content
};

std::string zip_of(const std::vector<Record>& records) {
  const auto number = [](auto value) { return std::string(reinterpret_cast<const char*>(&value), sizeof value); };
  std::string all, directory;
  for (const auto& [name, content, method, size] : records) {
    const auto stored = static_cast<std::uint32_t>(content.size());
    const auto fields = number(method) + std::string(8, '\0') + number(stored) + number(size == 0 ? stored : size) +
                        number(static_cast<std::uint16_t>(name.size())) + std::string(2, '\0');
    directory += "PK\1\2" + std::string(6, '\0') + fields + std::string(10, '\0') +
                 number(static_cast<std::uint32_t>(all.size())) + name;
    all += "PK\3\4" + std::string(4, '\0') + fields + name + content;
  }
  const auto count = static_cast<std::uint16_t>(records.size());
  return all + directory + "PK\5\6" + std::string(4, '\0') + number(count) + number(count) +
         number(static_cast<std::uint32_t>(directory.size())) + number(static_cast<std::uint32_t>(all.size())) +
         std::string(2, '\0');
}

TEST(Zarr, ShardsAreReadByTheirIndex) {
  const Folder folder;
  const auto store = folder.path() / "s.zarr";
  const auto x = at::arange(24, at::kInt).view({8, 3});
  const Json sharding{{"chunk_shape", {2, 3}},
                      {"codecs", Json::array({{{"name", "bytes"}}})},
                      {"index_codecs", Json::array({{{"name", "bytes"}, {"configuration", {{"endian", "little"}}}}})},
                      {"index_location", "start"}};
  const auto codecs = Json::array({{{"name", "sharding_indexed"}, {"configuration", sharding}}});
  write(store / "zarr.json", R"({"zarr_format": 3, "node_type": "group"})");
  write(store / "x/zarr.json", array_of_version_3({8, 3}, {4, 3}, {{"codecs", codecs}}).dump());
  const auto write_shard = [&](const std::vector<std::uint64_t>& index) {
    std::string content(reinterpret_cast<const char*>(index.data()), index.size() * sizeof(std::uint64_t));
    write(store / "x/c/0/0", content + chunk_bytes(x, 2, 2) + chunk_bytes(x, 0, 2));
  };
  constexpr auto none = ~std::uint64_t{0};
  const auto read = [&] { return Dataset(store).column("x"); };
  write_shard({56, 24, 32, 24});
  EXPECT_TRUE(at::equal(read(), at::cat({x.narrow(0, 0, 4), at::full({4, 3}, 7, at::kInt)})));
  const auto open = Dataset::from_hdf5({store.string()}, {.cache_bytes = 0});
  EXPECT_TRUE(at::equal(open.column("x"), read()));
  write_shard({56, 24, none, none});
  EXPECT_TRUE(at::equal(read().narrow(0, 2, 2), at::full({2, 3}, 7, at::kInt)));
  for (const auto& [index, fact] : std::vector<std::pair<std::vector<std::uint64_t>, std::string>>{
           {{56, 25, 32, 24}, "it ends beyond the end of its shard"},
           {{none - 3, 24, 32, 24}, "it ends beyond the end of its shard"},
           {{56, 23, 32, 24}, "its 23 stored bytes do not decode to 24"}}) {
    write_shard(index);
    expect_text(error_of([&] { read(); }), fact);
  }
  write(store / "x/c/0/0", "short");
  expect_text(error_of([&] { read(); }), "the shard has 5 bytes, fewer than its index");
  auto checked = sharding;
  checked["index_codecs"].push_back({{"name", "crc32c"}});
  const auto with_checksum = [&](const Json& options) {
    return array_of_version_3({8, 3}, {4, 3},
                              {{"codecs", Json::array({{{"name", "sharding_indexed"}, {"configuration", options}}})}})
        .dump();
  };
  write(store / "x/zarr.json", with_checksum(checked));
  write_shard({56, 24, 32, 24});
  expect_text(error_of([&] { read(); }), "its crc32c checksum does not match");
  checked = sharding;
  checked["codecs"].push_back({{"name", "crc32c"}});
  write(store / "x/zarr.json", with_checksum(checked));
  write_shard({52, 28, 32, 24});
  expect_text(error_of([&] { read(); }), "its crc32c checksum does not match");
  // An archive may compress chunks once more, but no shards, of which parts are read.
  const auto group = std::string(R"({"zarr_format": 3, "node_type": "group"})");
  write(folder.path() / "s.zip", zip_of({{"zarr.json", group},
                                         {"x/zarr.json", with_checksum(sharding)},
                                         {"x/c/0/0", zlib(std::string(80, 'a')).substr(2), 8, 80}}));
  expect_text(error_of([&] { Dataset(folder.path() / "s.zip").column("x"); }),
              "it is a shard that the archive compresses once more");
}

TEST(Zarr, ArchivesAreReadInPlace) {
  const Folder folder;
  const auto path = folder.path() / "s.zarr.zip";
  const auto x = at::arange(12, at::kInt).view({4, 3});
  const auto array = array_of_version_2({4, 3}, {2, 3}).dump();
  const Record group{".zgroup", R"({"zarr_format": 2})"};
  // The second record of a name counts, and zlib's frame is 2 bytes before and 4 after what deflate makes.
  const auto packed = zlib(chunk_bytes(x, 2, 2));
  const Record deflated{"x/1.0", packed.substr(2, packed.size() - 6), 8, 24};
  write(path, zip_of({group, {"x/.zarray", "{}"}, {"x/.zarray", array}, {"x/0.0", chunk_bytes(x, 0, 2)}, deflated}));
  EXPECT_TRUE(at::equal(Dataset(path).column("x"), x));
  const auto error_with = [&](const Record& record) {
    write(path, zip_of({group, {"x/.zarray", array}, record}));
    return error_of([&] { Dataset(path).column("x"); });
  };
  expect_text(error_with({"x/0.0", "abc", 9, 24}), "its record is neither stored nor deflated");
  expect_text(error_with({"x/0.0", "abc", 8, 24}), "it does not unpack to the size that the archive announces");
  expect_text(error_with({"x/0.0", "abc", 8, 1 << 30}), "it announces more bytes than can be packed in it");
  write(path, zip_of({{"s.zarr/.zgroup", group.content}}));
  expect_text(error_of([&] { Dataset(path).count(); }),
              "it holds no Zarr store: there is no zarr.json, .zgroup or .zarray");
}

TEST(Zarr, HostileNamesAndAttributesEndInAnErrorOrAreLeftOut) {
  const Folder folder;
  const Record group{".zgroup", R"({"zarr_format": 2})"};
  std::vector<Record> records{group, {"x/.zarray", array_of_version_2({4}, {4}).dump()}};
  records.push_back({std::string("\0/.zgroup", 9), group.content});
  records.push_back({"../y/.zarray", array_of_version_2({4}, {4}).dump()});
  records.push_back({"x/.zattrs", Json{{std::string(70'000, 'n'), 1}, {"high", ~std::uint64_t{0}}}.dump()});
  // Each group takes a piece of the stack.
  for (std::string name = "g/"; name.size() < 6'000; name += "g/") records.push_back({name + ".zgroup", group.content});
  const auto path = folder.path() / "s.zip";
  write(path, zip_of(records));
  EXPECT_TRUE(at::equal(Dataset(path).column("x"), at::full({4}, 7, at::kInt)));
  std::string inner = path.string() + ":/";
  for (int i = 0; i < 64; ++i) inner += "g/";
  expect_text(error_of([&] { Dataset::from_hdf5({inner}, {.columns = {"g"}}).count(); }),
              "it lies more than 64 levels deep");
}

TEST(Zarr, AnArrayAtTheRootHasTheNameOfTheStore) {
  const Folder folder;
  write(folder.path() / "s.zarr/.zarray", array_of_version_2({4}, {4}).dump());
  for (const auto* path : {"s.zarr", "s.zarr/", "s.zarr/."})
    EXPECT_TRUE(at::equal(Dataset((folder.path() / path).string()).column("s"), at::full({4}, 7, at::kInt))) << path;
}

TEST(Zarr, FillValuesAreExact) {
  const Folder folder;
  const auto store = folder.path() / "s.zarr";
  write(store / "zarr.json", R"({"zarr_format": 3, "node_type": "group"})");
  const auto column = [&](const char* type, const Json& fill) {
    write(store / "x/zarr.json", array_of_version_3({2}, {2}, {{"data_type", type}, {"fill_value", fill}}).dump());
    return Dataset(store).column("x");
  };
  const auto bits = [](const at::Tensor& values) {
    return std::string(static_cast<const char*>(values.const_data_ptr()), values.nbytes() / 2);
  };
  EXPECT_EQ(bits(column("float32", "0x7fc00001")), std::string("\1\0\xc0\x7f", 4));
  EXPECT_EQ(bits(column("float32", -0.0)), std::string("\0\0\0\x80", 4));
  EXPECT_EQ(bits(column("float16", "-Infinity")), std::string("\0\xfc", 2));
  EXPECT_EQ(bits(column("bfloat16", 1)), std::string("\x80\x3f", 2));
  EXPECT_EQ(bits(column("complex64", {-0.0, 1})), std::string("\0\0\0\x80\0\0\x80\x3f", 8));
  EXPECT_EQ(bits(column("bool", true)), "\1");
  EXPECT_EQ(bits(column("int8", -128)), "\x80");
  const std::vector<std::pair<const char*, Json>> wrong{{"uint8", -1},
                                                        {"int8", 128},
                                                        {"int32", 0.5},
                                                        {"int32", "0x1"},
                                                        {"float32", "0x1"},
                                                        {"float32", "0x0000000g"},
                                                        {"complex64", Json::array({1})},
                                                        {"complex64", {"x", 1}},
                                                        {"bool", "true"},
                                                        {"int64", std::uint64_t{1} << 63}};
  for (const auto& [type, fill] : wrong)
    expect_text(error_of([&, &type = type, &fill = fill] { column(type, fill); }), "is no number of its type");
}

TEST(Zarr, WindowsOfAPartGoByTheValuesOfACoordinate) {
  const Folder folder;
  const auto store = folder.path() / "s.zarr";
  const auto time = at::arange(100, 140, 2, at::kInt).view({20, 1});  // 100, 102, …
  write(store / ".zgroup", R"({"zarr_format": 2})");
  write(store / "time/.zarray", array_of_version_2({20}, {20}).dump());
  write(store / "time/.zattrs", R"({"_ARRAY_DIMENSIONS": ["time"]})");
  write(store / "time/0", chunk_bytes(time, 0, 20));
  const auto x = at::arange(60, at::kInt).view({20, 3});
  write(store / "g/.zgroup", R"({"zarr_format": 2})");
  write(store / "g/x/.zarray", array_of_version_2({20, 3}, {20, 3}).dump());
  write(store / "g/x/.zattrs", R"({"_ARRAY_DIMENSIONS": ["time", "band"], "missing_value": NaN})");
  write(store / "g/x/0.0", chunk_bytes(x, 0, 20));
  const auto path = store.string() + ":/g/x";
  const auto windows = [&](std::pair<double, double> part, const std::string& name = "time") {
    return Dataset::windows({path}, {.size = {2, 0}, .stride = {2, 0}, .margin = {1, 0}, .range = {{name, part}}});
  };
  // 108 is at 4, and 117 lies between two values; so windows begin at 4, 6 and 8 and may end before 9.
  const auto some = windows({107.5, 117});
  ASSERT_EQ(some.count(), 2);
  const std::vector<std::int64_t> second{1};
  const auto batch = some.read(second);
  EXPECT_TRUE(at::equal(batch["origin"], at::tensor({6, 0}, at::kLong).view({1, 2})));
  EXPECT_TRUE(at::equal(batch["x"][0], x.narrow(0, 5, 4))) << "a margin has values outside of the part";
  expect_text(error_of([&] { windows({200, 300}).count(); }), "none of its values lies there");
  expect_text(error_of([&] { windows({0, 300}, "depth").count(); }), "it has no dimension of that name");
  expect_text(error_of([&] { windows({0, 300}, "band").count(); }), "there is no coordinate of that name");
  write(store / "time/0", chunk_bytes(time.remainder(9), 0, 20));
  expect_text(error_of([&] { windows({0, 3}).count(); }), "its values do not ascend or descend: the part has gaps");
  write(store / "band/.zarray", array_of_version_2({3, 1}, {3, 1}).dump());
  expect_text(error_of([&] { windows({0, 3}, "band").count(); }), "the coordinate has 2 dimensions");
}

TEST(Zarr, ConversionsSayWhatTheirInputIs) {
  const Folder folder;
  write_store(folder.path() / "s.zarr", 10, 4);
  convert_zarr({folder.path() / "s.zarr"}, folder.path() / "s.h5");
  expect_text(error_of([&] { convert_h5({folder.path() / "s.zarr"}, folder.path() / "t.h5"); }), "it is a Zarr store");
  expect_text(error_of([&] { convert_zarr({folder.path() / "s.h5"}, folder.path() / "t.h5"); }), "it is no Zarr store");
  expect_text(error_of(
                  [&] {
                    convert_zarr({"a", "b"}, folder.path() / "t.h5");
                  },
                  ExitCode::usage),
              "2 inputs are given, and one Zarr store is copied");
  const auto description = describe_dataset((folder.path() / "s.zarr").string());
  EXPECT_EQ(description.at("samples"), 10);
  EXPECT_EQ(description.at("columns")[0].at("compression"), "zlib");
  EXPECT_EQ(description.at("columns")[1].at("compression"), "none");
  fs::remove(folder.path() / "s.zarr/x/1.0");
  const auto advice = [&] { return describe_dataset((folder.path() / "s.zarr").string()).at("advice").dump(); };
  expect_text(advice(), "chunks are missing");
  write(folder.path() / "s.zarr/damaged/.zarray", array_of_version_2({5}, {5}).dump());
  write(folder.path() / "s.zarr/damaged/0", "short");
  expect_text(advice(), "s.zarr:/damaged, chunk (0) in 0: its 5 stored bytes do not decode");
}

}  // namespace
}  // namespace muster::zarr_test
