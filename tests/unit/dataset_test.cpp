#include "muster/dataset.hpp"

#include "base/file.hpp"
#include "hdf5/types.hpp"
#include "muster/error.hpp"
#include "support/hdf5_fixture.hpp"
#include "support/io_errors.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/quantize_per_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <thread>

namespace muster::dataset_test {
namespace {

using test::counting;
using test::Folder;
using test::H5File;
using test::Layout;
using Samples = std::vector<std::int64_t>;

/// The samples of a dataset as H5File::columns writes it.
void expect_samples(const Dataset& dataset, const Samples& samples) {
  const Batch batch = dataset.read(samples);
  const auto rows = at::tensor(samples);
  EXPECT_EQ(batch.size(), static_cast<std::int64_t>(samples.size()));
  EXPECT_TRUE(at::equal(batch["y"], rows)) << batch["y"];
  EXPECT_TRUE(at::equal(batch["x"], (rows.unsqueeze(1) * 3 + at::arange(3)).to(at::kFloat))) << batch["x"];
}

const Samples orders[] = {{0}, {9}, {0, 1, 2, 3}, {3, 2, 1, 0}, {7, 0, 9, 1, 8}, {5, 5, 5}, {2, 3, 2, 4, 3, 9, 0}, {}};

/// The message of the Error that `action` throws; its code is `code`.
template <class Action>
std::string error_of(Action action, ExitCode code = ExitCode::data) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << "\nin: " << text;
}

/// Opening the dataset fails, and the message holds all `parts`.
void expect_refused(const Dataset& dataset, const std::vector<std::string>& parts) {
  expect_parts(error_of([&] { dataset.count(); }), parts);
}

TEST(Batch, KnowsItsColumns) {
  Batch batch({{"x", at::zeros({3, 2})}, {"y", at::zeros({3})}});
  EXPECT_EQ(batch.size(), 3);
  EXPECT_EQ(batch.global_size(), 3);
  EXPECT_EQ(batch["x"].size(1), 2);
  EXPECT_EQ(batch.begin()->first, "x");
  expect_parts(error_of([&] { batch["z"]; }), {"\"z\"", "x, y"});
  batch.set("z", at::zeros({3}));
  EXPECT_TRUE(batch.contains("z"));
  EXPECT_EQ(batch.num_columns(), 3u);
  expect_parts(error_of([] { Batch({{"x", at::zeros({3})}, {"y", at::zeros({4})}}); }), {"3 rows", "4"});
  const Batch ghost({{"x", at::zeros({1})}}, 0, 5);
  EXPECT_EQ(ghost.size(), 0);
  EXPECT_EQ(ghost.global_size(), 5);
}

TEST(Tensors, AreReadInAnyOrder) {
  const auto x = at::arange(30, at::kFloat).view({10, 3});
  const auto dataset = Dataset::from_tensors({{"x", x}, {"y", at::arange(10)}});
  EXPECT_EQ(dataset.count(), 10);
  EXPECT_EQ(dataset.schema(), (Schema{{"x", at::kFloat, {3}}, {"y", at::kLong, {}}}));
  for (const auto& order : orders) expect_samples(dataset, order);
  auto batch = dataset.read(Samples{4});
  batch["x"].zero_();
  EXPECT_EQ(x[4][0].item<float>(), 12) << "a batch owns its memory";
  expect_parts(error_of([&] { dataset.read(Samples{10}); }, ExitCode::usage), {"10"});
  expect_parts(error_of([&] { dataset.read(Samples{-1}); }, ExitCode::usage), {"-1"});
}

TEST(Tensors, MustAgree) {
  expect_parts(error_of([] { Dataset::from_tensors({}); }), {"no tensors", "at least one column"});
  expect_parts(error_of([] { Dataset::from_tensors({{"x", at::zeros({2})}, {"y", at::zeros({3})}}); }), {"2", "3"});
  expect_parts(error_of([] { Dataset::from_tensors({{"x", at::zeros({})}}); }), {"first dimension"});
  expect_parts(error_of([] { Dataset::from_tensors({{"x", at::zeros({0, 4})}}); }), {"no samples"});
  expect_parts(error_of([] {
                 Dataset::from_tensors({{"x", at::zeros({3, 3}).to_sparse()}});
               }),
               {"\"x\" is a sparse, nested or quantized tensor", "to_dense()"});
  expect_parts(error_of([] {
                 Dataset::from_tensors({{"q", at::quantize_per_tensor(at::zeros({3}), 1, 0, at::kQInt8)}});
               }),
               {"\"q\" is a sparse, nested or quantized tensor", "dequantize()"});
  expect_parts(error_of([] {
                 Dataset::from_tensors({{"x", at::zeros({3}, at::kBits8)}});
               }),
               {"\"x\" is of type Bits8, and torch cannot choose samples of it"});
  expect_parts(error_of([] { Dataset::from_tensors({{"x", at::zeros({2})}, {"x", at::zeros({2})}}); }), {"\"x\""});
}

TEST(Hdf5, EveryLayoutGivesTheSameSamples) {
  const Folder folder;
  const std::pair<const char*, Layout> layouts[] = {{"contiguous", {}},
                                                    {"compact", {.compact = true}},
                                                    {"one row a chunk", {.chunk = 1}},
                                                    {"chunks", {.chunk = 4}},
                                                    {"deflate", {.chunk = 3, .deflate = 6}}};
  for (const auto& [name, layout] : layouts) {
    H5File(folder.file(name)).columns(10, 0, layout);
    for (const std::int64_t cache : {0, 100, 1 << 20}) {
      const auto dataset = Dataset::from_hdf5({folder.file(name)}, {.cache_bytes = cache});
      EXPECT_EQ(dataset.count(), 10);
      EXPECT_EQ(dataset.schema(), (Schema{{"x", at::kFloat, {3}}, {"y", at::kLong, {}}})) << name;
      for (const auto& order : orders) expect_samples(dataset, order);
    }
  }
}

TEST(Hdf5, ReadsManySamplesAtOnce) {
  const Folder folder;
  const hsize_t rows = 5000;
  H5File(folder.file("contiguous")).columns(rows);
  H5File(folder.file("chunked")).columns(rows, 0, {.chunk = 64});
  Samples odd, backwards;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(rows); ++i) backwards.push_back(4999 - i);
  for (std::int64_t i = 1; i < static_cast<std::int64_t>(rows); i += 2) odd.push_back(i);
  for (const char* file : {"contiguous", "chunked"}) {
    const auto dataset = Dataset::from_hdf5({folder.file(file)}, {.cache_bytes = 0});
    expect_samples(dataset, odd);
    expect_samples(dataset, backwards);
  }
}

TEST(Hdf5, ReadsWhatIsNotInMemory) {
  const Folder folder;
  const auto path = folder.file("a.h5");
  H5File(path).columns(20000);
  std::vector<std::int64_t> samples(20000);
  std::iota(samples.begin(), samples.end(), 0);
  std::ranges::shuffle(samples, std::mt19937(1));
  samples.resize(500);
  const Dataset dataset(path);
  const auto expect_values = [&] {
    const auto batch = dataset.read(samples);
    for (std::size_t i = 0; i < samples.size(); ++i)
      ASSERT_EQ(batch["x"][static_cast<std::int64_t>(i)][2].item<float>(), static_cast<float>(3 * samples[i] + 2));
    ASSERT_TRUE(at::equal(batch["y"], at::tensor(samples, at::kLong)));
  };
  expect_values();
  for (const int error : {EAGAIN, EOPNOTSUPP, EINVAL, EINTR, EIO}) {  // whatever it says, the read that waits decides
    const test::IoError reads("preadv2", "a.h5", error);
    expect_values();
    EXPECT_GT(reads.count(), 0);
  }
  // Parts of runs of samples are in memory, and others are not.
  const detail::File file(path, detail::File::Mode::read);
  ASSERT_EQ(::fdatasync(file.descriptor()), 0);
  for (off_t at = 0; at < 320000; at += 12288)
    ASSERT_EQ(::posix_fadvise(file.descriptor(), at, 4096, POSIX_FADV_DONTNEED), 0);
  std::iota(samples.begin(), samples.end(), 1000);
  expect_values();
}

TEST(Hdf5, AUserBlockShiftsTheOffset) {
  const Folder folder;
  H5File(folder.file("a.h5"), 512).columns(10);
  expect_samples(folder.file("a.h5"), {3, 1});
}

TEST(Hdf5, NeverWrittenValuesAreTheFillValue) {
  const Folder folder;
  for (const hsize_t userblock : {0, 512})  // MATLAB's files have one
    for (const hsize_t rows : {4, 100'000}) {
      H5File(folder.file("a.h5"), userblock).dataset("x", {rows}, H5T_NATIVE_FLOAT, 0, nullptr);
      EXPECT_TRUE(at::equal(Dataset(folder.file("a.h5")).read(Samples{0, 3})["x"], at::zeros({2})));
      const auto windows = Dataset::windows({folder.file("a.h5") + ":/x"}, {.size = {2}});
      EXPECT_TRUE(at::equal(windows.read(Samples{1})["x"], at::zeros({1, 2})));
    }
}

TEST(Hdf5, StoredTypesAreKept) {
  const Folder folder;
  const auto bytes = counting<std::uint8_t>(6);
  const auto ints = counting<std::int32_t>(6);
  const auto floats = counting<float>(6);
  const std::uint8_t flags[] = {0, 1, 1, 0, 1, 0};
  const auto half = detail::hdf5::memory_type_of(at::kHalf), bf16 = detail::hdf5::memory_type_of(at::kBFloat16),
             boolean = detail::hdf5::memory_type_of(at::kBool);
  {
    H5File file(folder.file("a.h5"));
    file.dataset("u8", {6}, H5T_STD_U8LE, H5T_NATIVE_UINT8, bytes.data());
    file.dataset("i8", {6}, H5T_STD_I8BE, H5T_NATIVE_UINT8, bytes.data());
    file.dataset("i16be", {6}, H5T_STD_I16BE, H5T_NATIVE_INT32, ints.data());
    file.dataset("u16", {6}, H5T_STD_U16LE, H5T_NATIVE_INT32, ints.data());
    file.dataset("i64be", {6}, H5T_STD_I64BE, H5T_NATIVE_INT32, ints.data());
    file.dataset("f32be", {6}, H5T_IEEE_F32BE, H5T_NATIVE_FLOAT, floats.data());
    file.dataset("f64", {6}, H5T_IEEE_F64LE, H5T_NATIVE_FLOAT, floats.data());
    file.dataset("half", {6}, half.get(), H5T_NATIVE_FLOAT, floats.data());
    file.dataset("bf16", {6}, bf16.get(), H5T_NATIVE_FLOAT, floats.data());
    file.dataset("bool", {6}, boolean.get(), boolean.get(), flags);
  }
  const Dataset dataset(folder.file("a.h5"));
  const std::map<std::string, at::ScalarType> types{
      {"u8", at::kByte},     {"i8", at::kChar},    {"i16be", at::kShort}, {"u16", at::kInt},       {"i64be", at::kLong},
      {"f32be", at::kFloat}, {"f64", at::kDouble}, {"half", at::kHalf},   {"bf16", at::kBFloat16}, {"bool", at::kBool}};
  const auto batch = dataset.read(Samples{5, 0, 2});
  EXPECT_EQ(batch.num_columns(), types.size());
  for (const auto& [name, type] : types) {
    EXPECT_EQ(batch[name].scalar_type(), type) << name;
    const auto want = name == "bool" ? at::tensor({0.F, 0.F, 1.F}) : at::tensor({5.F, 0.F, 2.F});
    EXPECT_TRUE(at::equal(batch[name].to(at::kFloat), want)) << name << batch[name];
  }
}

TEST(Hdf5, AnUnsignedNumberThatNoTensorHoldsIsAnError) {
  const Folder folder;
  const std::uint64_t values[] = {1, 1ULL << 62, (1ULL << 63) + 5};
  for (const hid_t stored : {H5T_STD_U64LE, H5T_STD_U64BE})
    for (const hsize_t rows : {2, 3}) {
      const auto path = folder.file(std::to_string(rows) + (stored == H5T_STD_U64LE ? "le.h5" : "be.h5"));
      H5File(path).dataset("id", {rows}, stored, H5T_NATIVE_UINT64, values);
      const Dataset dataset(path);
      EXPECT_EQ(dataset.schema().front().dtype, at::kLong);
      EXPECT_TRUE(at::equal(dataset.read(Samples{0, 1})["id"], at::tensor({std::int64_t{1}, std::int64_t{1} << 62})));
      if (rows == 2) continue;
      try {
        dataset.read(Samples{1, 2});
        ADD_FAILURE() << "it became another number";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::data);
        EXPECT_NE(std::string(error.what()).find("row 2 holds a number above 2^63"), std::string::npos) << error.what();
      }
    }
}

TEST(Hdf5, ABoolIsZeroOrOneWhateverIsStored) {
  const Folder folder;
  const std::uint8_t flags[] = {0, 1, 2, 255};
  const auto boolean = detail::hdf5::memory_type_of(at::kBool);
  H5File(folder.file("a.h5")).dataset("x", {4}, boolean.get(), boolean.get(), flags);
  const auto x = Dataset(folder.file("a.h5")).read(Samples{0, 1, 2, 3})["x"];
  const auto* values = static_cast<const std::uint8_t*>(x.const_data_ptr());
  EXPECT_EQ(std::vector<std::uint8_t>(values, values + 4), (std::vector<std::uint8_t>{0, 1, 1, 1}));
}

TEST(Hdf5, GroupsColumnsAndFiles) {
  const Folder folder;
  {
    H5File a(folder.file("a.h5"));
    a.group("g");
    a.columns(4, 0, {}, "g/");
    a.columns(3);
    const float scalar = 1;
    a.dataset("scalar", {}, H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, &scalar);
    H5File b(folder.file("b.h5"));
    b.group("g");
    b.columns(6, 4, {.chunk = 2}, "g/");
  }
  expect_samples(folder.file("a.h5"), {2, 0});
  const Dataset path = std::filesystem::path(folder.file("a.h5") + ":/g");
  EXPECT_EQ(path.count(), 4);
  const auto both = Dataset::from_hdf5({folder.file("a.h5") + ":/g", folder.file("b.h5") + ":/g"});
  EXPECT_EQ(both.count(), 10);
  for (const auto& order : orders) expect_samples(both, order);
  const auto chosen = Dataset::from_hdf5({folder.file("a.h5")}, {.columns = {"y", "x"}});
  EXPECT_EQ(chosen.schema(), (Schema{{"y", at::kLong, {}}, {"x", at::kFloat, {3}}}));
}

TEST(Hdf5, MoreFilesThanTheLimitOfOpenFiles) {
  constexpr std::int64_t files = 300;
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  if (before.rlim_max < 3 * files) GTEST_SKIP() << "the hard limit of open files is " << before.rlim_max;
  const rlimit low{files, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  const Folder folder;
  std::vector<std::string> paths;
  for (std::int64_t i = 0; i < files; ++i) {
    paths.push_back(folder.file(std::to_string(i) + ".h5"));
    H5File(paths.back()).columns(2, 2 * i);
  }
  for (const auto& order : {Samples{599, 0, 300}, Samples{1, 2, 3, 598}})
    expect_samples(Dataset::from_hdf5(paths), order);
  ::setrlimit(RLIMIT_NOFILE, &before);
}

TEST(Hdf5, ADimensionWithoutAVariableIsNoColumn) {
  const Folder folder;
  {
    H5File file(folder.file("a.nc"));
    file.columns(10);
    file.only_dimension("sample", 10);
    file.only_dimension("feature", 3);
    file.dataset("time", {10}, H5T_IEEE_F32LE, 0, nullptr);  // a dimension with a variable
    file.text_attribute("time", "CLASS", "DIMENSION_SCALE");
    file.text_attribute("time", "NAME", "time");
  }
  const Dataset dataset(folder.file("a.nc"));
  EXPECT_EQ(dataset.schema(), (Schema{{"time", at::kFloat, {}}, {"x", at::kFloat, {3}}, {"y", at::kLong, {}}}));
  for (const auto& order : orders) expect_samples(dataset, order);
}

TEST(Hdf5, ManyThreadsReadAtOnce) {
  const Folder folder;
  H5File(folder.file("a.h5")).columns(500, 0, {.chunk = 7, .deflate = 1});
  const Dataset dataset(folder.file("a.h5"));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&dataset, t] {
      for (std::int64_t i = 0; i < 100; ++i) expect_samples(dataset, {i + t, 499 - i, i});
    });
  for (auto& thread : threads) thread.join();
}

TEST(BadFiles, AreToldApart) {
  const Folder folder;
  const auto file = [&](const char* name) { return folder.file(name); };
  expect_refused(file("none.h5"), {"none.h5", "No such file", "muster convert"});
  expect_refused(file(""), {"folder"});
  std::ofstream(file("text.h5")) << "a,b\n1,2\n";
  expect_refused(file("text.h5"), {"text.h5", "not an HDF5 file"});
  std::ofstream(file("empty.h5"));
  expect_refused(file("empty.h5"), {"empty.h5", "not an HDF5 file"});
  H5File(file("cut.h5")).columns(1000);
  std::filesystem::resize_file(file("cut.h5"), std::filesystem::file_size(file("cut.h5")) / 2);
  expect_refused(file("cut.h5"), {"cut.h5", "truncated"});
  H5File(file("no columns.h5"));
  expect_refused(file("no columns.h5"), {"no columns.h5", "holds no datasets"});
  expect_refused(file("no columns.h5:/g"), {"no group \"/g\""});
  H5File(file("good.h5")).columns(3);
  expect_refused(Dataset::from_hdf5({file("good.h5")}, {.columns = {"x", "z"}}), {"good.h5:/z", "no dataset \"z\""});
  H5File(file("group.h5")).group("g");
  expect_refused(Dataset::from_hdf5({file("group.h5")}, {.columns = {"g"}}), {"group.h5:/g", "\"g\" is not a dataset"});
  H5File(file("single.h5")).dataset("x", {}, H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, std::array{1.0F}.data());
  expect_refused(Dataset::from_hdf5({file("single.h5")}, {.columns = {"x"}}), {"a single value, not a column"});
  H5File(file("no samples.h5")).dataset("x", {0, 2}, H5T_NATIVE_FLOAT, 0, nullptr);
  expect_refused(file("no samples.h5"), {"no samples.h5", "has no samples"});
  H5File(file("no values.h5")).dataset("x", {2, 0}, H5T_NATIVE_FLOAT, 0, nullptr);
  expect_refused(file("no values.h5"), {"no values.h5:/x", "a dimension is 0"});
  H5File(file("huge.h5"))
      .dataset("x", {hsize_t{1} << 40, hsize_t{1} << 40}, H5T_NATIVE_FLOAT, 0, nullptr, {.chunk = 0});
  expect_refused(file("huge.h5"), {"huge.h5:/x", "larger than any memory"});
  for (const hsize_t size : {hsize_t{1} << 43, hsize_t{1} << 58}) {  // no values were written, so the file is small
    H5File(file("wide.h5")).dataset("x", {9, size}, H5T_NATIVE_UINT8, 0, nullptr, {.chunk = 1, .inner_chunk = 1 << 20});
    const Dataset wide(file("wide.h5"));
    EXPECT_EQ(wide.count(), 9);
    expect_parts(error_of([&] {
                   wide.read(std::vector<std::int64_t>{0, 3, 4, 5, 8});
                 }),
                 {"reading a batch", "more than the memory that this process may use"});
  }
  // HDF5 makes no dimension of 2^63 and more, so one is forged.
  H5File(file("beyond.h5")).dataset("x", {0x123456789aULL}, H5T_NATIVE_UINT8, 0, nullptr);
  {
    std::fstream bytes(file("beyond.h5"), std::ios::in | std::ios::out | std::ios::binary);
    std::string content((std::istreambuf_iterator<char>(bytes)), {});
    const std::string size("\x9a\x78\x56\x34\x12\0\0\0", 8), forged("\0\0\0\0\0\0\0\x80", 8);
    ASSERT_NE(content.find(size), std::string::npos);
    for (auto at = content.find(size); at != std::string::npos; at = content.find(size)) content.replace(at, 8, forged);
    bytes.clear();
    bytes.seekp(0);
    bytes << content;
  }
  error_of([&] { Dataset(file("beyond.h5")).count(); });
  H5File(file("many.h5")).dataset("x", {hsize_t{1} << 62}, H5T_NATIVE_UINT8, 0, nullptr);
  expect_refused(Dataset::from_hdf5({file("many.h5"), file("many.h5")}),
                 {"many.h5", "more samples than can be counted"});
  expect_parts(error_of([] { Dataset::from_hdf5({}); }), {"no files"});
  expect_parts(error_of([] { Dataset::from_hdf5({"a"}, {.columns = {"x", "x"}}); }), {"\"x\"", "twice"});
}

TEST(BadFiles, ColumnsMustAgree) {
  const Folder folder;
  const auto values = counting<float>(12);
  {
    H5File file(folder.file("ragged.h5"));
    file.dataset("a", {4}, H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, values.data());
    file.dataset("b", {5}, H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, values.data());
    H5File(folder.file("a4.h5")).dataset("a", {4}, H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, values.data());
    H5File(folder.file("b4.h5")).dataset("b", {4}, H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, values.data());
    H5File(folder.file("a43.h5")).dataset("a", {4, 3}, H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, values.data());
    H5File(folder.file("a4d.h5")).dataset("a", {4}, H5T_NATIVE_DOUBLE, H5T_NATIVE_FLOAT, values.data());
  }
  const auto with = [&](const char* name) { return Dataset::from_hdf5({folder.file("a4.h5"), folder.file(name)}); };
  expect_refused(folder.file("ragged.h5"), {"ragged.h5", "different length", "a: 4", "b: 5"});
  EXPECT_EQ(Dataset::from_hdf5({folder.file("ragged.h5")}, {.columns = {"b"}}).count(), 5);
  expect_refused(with("b4.h5"), {"b4.h5", "a4.h5"});
  expect_refused(with("a43.h5"), {"a43.h5", "\"a\"", "[3]", "[]"});
  expect_refused(with("a4d.h5"), {"a4d.h5", "Float", "Double"});
}

TEST(BadFiles, OnlyNumbersAreColumns) {
  const Folder folder;
  const detail::hdf5::Handle text(H5Tcopy(H5T_C_S1), H5Tclose), pair(H5Tcreate(H5T_COMPOUND, 8), H5Tclose);
  H5Tset_size(text.get(), H5T_VARIABLE);
  H5Tinsert(pair.get(), "a", 0, H5T_NATIVE_INT);
  H5Tinsert(pair.get(), "b", 4, H5T_NATIVE_INT);
  H5File(folder.file("text.h5")).dataset("names", {3}, text.get(), 0, nullptr);
  H5File(folder.file("pair.h5")).dataset("pairs", {3}, pair.get(), 0, nullptr);
  expect_refused(folder.file("text.h5"), {"text.h5:/names", "strings"});
  expect_refused(folder.file("pair.h5"), {"pair.h5:/pairs", "compound values", "as columns: pairs.a, pairs.b"});

  const detail::hdf5::Handle narrow(H5Tcopy(H5T_STD_I32LE), H5Tclose);
  H5Tset_size(narrow.get(), 3);
  H5File(folder.file("narrow.h5")).dataset("x", {3}, narrow.get(), 0, nullptr);
  H5File(folder.file("wide.h5")).dataset("x", {3}, H5T_NATIVE_LDOUBLE, 0, nullptr);
  expect_refused(folder.file("narrow.h5"), {"it holds integers of 3 bytes; tensors hold those of 1, 2, 4 and 8"});
  expect_refused(folder.file("wide.h5"),
                 {"it holds floating-point numbers of 16 bytes; tensors hold those of 2, 4 and 8"});
}

/// Made before anything of ours runs, since no link to another file can be made after that.
struct ExternalLink : Folder {
  ExternalLink() {
    const auto make = [this](const char* name) {
      return H5Fcreate(file(name).c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    };
    const hid_t target = make("target.h5"), from = make("link.h5");
    const hsize_t rows = 3;
    const hid_t space = H5Screate_simple(1, &rows, nullptr);
    H5Dclose(H5Dcreate2(target, "y", H5T_NATIVE_INT64, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    H5Sclose(space);
    H5Lcreate_external("target.h5", "/y", from, "y", H5P_DEFAULT, H5P_DEFAULT);
    H5Fclose(from);
    H5Fclose(target);
  }
};
const ExternalLink external_link;

TEST(BadFiles, NothingLeadsOutside) {
  const Folder folder;
  H5File(folder.file("target.h5")).columns(3);
  std::ofstream(folder.file("raw")) << std::string(100, 'x');
  const hsize_t rows = 3;
  const detail::hdf5::Handle space(H5Screate_simple(1, &rows, nullptr), H5Sclose);
  {
    H5File dangling(folder.file("dangling.h5"));
    H5Lcreate_soft("/nowhere", dangling.id(), "y", H5P_DEFAULT, H5P_DEFAULT);
    const detail::hdf5::Handle external(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_external(external.get(), folder.file("raw").c_str(), 0, 24);
    H5File(folder.file("external.h5")).create("y", H5T_NATIVE_INT64, 0, space.get(), external.get(), nullptr);
    const detail::hdf5::Handle view(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_virtual(view.get(), space.get(), folder.file("target.h5").c_str(), "/y", space.get());
    H5File(folder.file("virtual.h5")).create("y", H5T_NATIVE_INT64, 0, space.get(), view.get(), nullptr);
  }
  expect_refused(external_link.file("link.h5"), {"link.h5:/y", "link to another file"});
  expect_refused(Dataset::from_hdf5({external_link.file("link.h5")}, {.columns = {"y"}}),
                 {"link.h5:/y", "it is a link to another file; such links are not followed"});
  expect_refused(Dataset::from_hdf5({external_link.file("link.h5")}, {.columns = {"y/z"}}),
                 {"it is a link to another"});
  expect_refused(folder.file("dangling.h5"), {"dangling.h5:/y", "whose target does not exist"});
  expect_refused(folder.file("external.h5"), {"external.h5:/y", "external storage"});
  expect_refused(folder.file("virtual.h5"), {"virtual.h5:/y", "virtual"});
}

TEST(BadFiles, WhatHdf5CannotOpenIsNotTakenForALink) {
  const Folder folder;
  const auto path = folder.file("new.h5");
  haddr_t offset = 0;
  {
    H5File file(path);
    file.columns(3);
    const detail::hdf5::Handle x(H5Dopen2(file.id(), "x", H5P_DEFAULT), H5Dclose);
    offset = H5Dget_offset(x.get());
  }
  auto content = detail::read_file(path);
  std::string layout("\3\1", 2);  // version 3, contiguous
  layout.append(reinterpret_cast<const char*>(&offset), sizeof offset);
  ASSERT_NE(content.find(layout), std::string::npos);
  auto& version = content[content.find(layout)];
  const auto write = [&] { std::ofstream(path, std::ios::binary) << content; };
  version = 99;
  write();
  expect_refused(path, {"new.h5:/x: a newer HDF5 than this one wrote it", "version number", "'v110'"});
  expect_refused(Dataset::from_hdf5({path}, {.columns = {"x"}}), {"new.h5:/x: a newer HDF5 than this one wrote it"});
  EXPECT_EQ(Dataset::from_hdf5({path}, {.columns = {"y"}}).count(), 3);
  version = 3;
  *(&version + 1) = 99;  // the class of the layout
  write();
  expect_refused(path, {"new.h5:/x: HDF5 cannot open it: ", "Make or copy the file again"});
}

TEST(BadFiles, AnErrorOfTheDiskIsNotOfTheData) {
  const Folder folder;
  H5File(folder.file("plain.h5")).columns(100);
  H5File(folder.file("packed.h5")).columns(100, 0, {.chunk = 7, .deflate = 1});
  for (const int error : {EIO, ESTALE, ETIMEDOUT}) {
    const auto word = std::strerror(error);
    for (const char* file : {"plain.h5", "packed.h5"}) {
      const Dataset dataset(folder.file(file));
      EXPECT_EQ(dataset.count(), 100);
      const test::IoError sick("preadv", file, error);
      expect_parts(error_of([&] { dataset.read(Samples{0, 99}); }, ExitCode::retry), {file, word, "try again"});
    }
    const test::IoError sick("pread", "plain.h5", error);
    expect_parts(error_of([&] { Dataset(folder.file("plain.h5")).count(); }, ExitCode::retry), {word, "try again"});
  }
  {
    const test::IoError many("open", "plain.h5", EMFILE);
    expect_parts(error_of([&] { Dataset(folder.file("plain.h5")).count(); }, ExitCode::retry),
                 {"Too many open files. Raise the limit of open files (ulimit -n), then try again"});
  }
  const test::IoError closed("open", "plain.h5", EACCES);
  expect_parts(error_of([&] { Dataset(folder.file("plain.h5")).count(); }, ExitCode::data),
               {"Permission denied. Check the permissions"});
}

TEST(BadFiles, AreTriedAgain) {
  const Folder folder;
  const Dataset dataset(folder.file("late.h5"));
  expect_refused(dataset, {"No such file"});
  H5File(folder.file("late.h5")).columns(3);
  EXPECT_EQ(dataset.count(), 3);
  std::filesystem::resize_file(folder.file("late.h5"), 100);
  expect_parts(error_of([&] { dataset.read(Samples{0, 1, 2}); }), {"late.h5:/x", "shorter"});
}

}  // namespace
}  // namespace muster::dataset_test
