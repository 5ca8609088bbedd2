// Copies of HDF5 files into other layouts, and what is said of each layout.
#include "base/log.hpp"
#include "hdf5/attributes.hpp"
#include "hdf5/dimensions.hpp"
#include "hdf5/types.hpp"
#include "muster/convert.hpp"
#include "muster/dataset.hpp"
#include "support/files.hpp"
#include "support/hdf5_fixture.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <random>

namespace muster::convert_h5_test {
namespace {

using test::H5File, test::Layout, test::message, test::values;
using Ints = std::vector<std::int32_t>;
namespace hdf5 = detail::hdf5;

constexpr int rows = 101, width = 6;

/// Bytes that this process has read by system calls.
std::uint64_t bytes_read() {
  std::ifstream io("/proc/self/io");
  std::string name;
  std::uint64_t bytes = 0;
  io >> name >> bytes;
  return bytes;
}

class ConvertH5 : public test::FolderTest {
 protected:
  std::filesystem::path input() const { return folder / "in.h5"; }
  std::filesystem::path output(const std::string& part = "") const {
    return folder / (part.empty() ? "out.h5" : "out." + part + ".h5");
  }
  void run(const ConvertOptions& options = {}, const std::string& group = "") const {
    convert_h5({input().string() + group}, output(), options);
  }
  static Ints counting(int count) { return test::counting<std::int32_t>(static_cast<std::size_t>(count)); }
  /// x: [rows, width] of 0, 1, 2 …
  void make(const Layout& layout, hid_t stored = H5T_STD_I32LE) const {
    H5File(input()).dataset("x", {rows, width}, stored, H5T_NATIVE_INT32, counting(rows * width).data(), layout);
  }
  Json described(const std::filesystem::path& path, std::size_t column = 0) const {
    return describe_dataset(path.string()).at("columns").at(column);
  }
  std::string refusal(ExitCode code, const ConvertOptions& options = {}, const std::string& group = "") const {
    const auto text = message(code, [&] { run(options, group); });
    EXPECT_EQ(names(), std::vector<std::string>{"in.h5"}) << text;
    return text;
  }
};

const std::vector<ConvertOptions> outputs{
    {}, {.chunk = 1}, {.chunk = 7}, {.chunk = 500}, {.compress = 3}, {.chunk = 10, .compress = 9}};

TEST_F(ConvertH5, CopiesEveryLayoutIntoEveryOther) {
  const std::vector<Layout> inputs{{},
                                   {.compact = true},
                                   {.chunk = 1},
                                   {.chunk = 10},
                                   {.chunk = 10, .deflate = 6},
                                   {.chunk = rows, .deflate = 1},
                                   {.chunk = 13, .inner_chunk = 4},
                                   {.chunk = 13, .deflate = 1, .inner_chunk = 4},
                                   {.chunk = 3, .deflate = 1, .inner_chunk = 1}};
  for (const auto& layout : inputs)
    for (const hid_t stored : {H5T_STD_I32LE, H5T_STD_I32BE}) {
      make(layout, stored);
      for (const auto& options : outputs) {
        run(options);
        EXPECT_EQ(values<std::int32_t>(output(), "x"), counting(rows * width));
        const auto column = described(output());
        EXPECT_EQ(column.at("dtype"), "int32");
        EXPECT_EQ(column.at("shape"), Json({rows, width}));
        EXPECT_EQ(column.at("layout"), options.chunk || options.compress ? "chunked" : "contiguous");
        EXPECT_EQ(column.at("reader"), options.compress ? "decoded" : "direct");
      }
    }
}

TEST_F(ConvertH5, KeepsTypes) {
  {
    H5File file(input());
    const hdf5::Lock lock;
    const auto add = [&](const char* name, hid_t type) {
      const std::vector<std::byte> zeros(16 * 4);
      file.dataset(name, {4}, type, type, zeros.data(), {.chunk = 3});
    };
    add("bfloat", hdf5::memory_type_of(at::kBFloat16).get());
    add("bool", hdf5::memory_type_of(at::kBool).get());
    add("complex", hdf5::memory_type_of(at::kComplexDouble).get());
    const hdf5::Handle kind(H5Tenum_create(H5T_STD_U16BE), H5Tclose);
    const std::uint16_t land = 1;
    H5Tenum_insert(kind.get(), "land", &land);
    add("enumeration", kind.get());
    add("half", hdf5::memory_type_of(at::kHalf).get());
    add("short", H5T_STD_U16BE);
    add("word", H5T_STD_U32LE);
  }
  run();
  const std::vector<std::string> expected{"bfloat16", "bool", "complex128", "uint16", "float16", "uint16", "uint32"};
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(described(output(), i).at("dtype"), expected[i]);
}

TEST_F(ConvertH5, ArraysWithNamedDimensionsMayBeReadInWindows) {
  {
    H5File file(input());
    file.columns(10, 3);
  }
  EXPECT_EQ(describe_dataset(input().string()).at("advice").dump().find("windows"), std::string::npos);
  {
    H5File file(input());
    const std::vector<float> values(24);
    file.dataset("t", {2, 3, 4}, H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, values.data());
    file.name_dimensions("t", {"time", "y", "x"});
  }
  const auto advice = describe_dataset(input().string()).at("advice").dump();
  EXPECT_NE(advice.find("reads windows of t as samples"), std::string::npos) << advice;
  EXPECT_NE(advice.find(input().string() + ":/t"), std::string::npos) << advice;
}

TEST_F(ConvertH5, ChoosesAndOrdersColumns) {
  {
    H5File file(input());
    file.columns(10);
    file.group("g");
    file.columns(5, 3, {}, "g/");
    const float one = 1;
    file.dataset("single", {}, H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, &one);
    file.only_dimension("sample", 10);
    const hdf5::Handle named(H5Tenum_create(H5T_NATIVE_INT), H5Tclose);
    H5Tcommit2(file.id(), "a_type", named.get(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  }
  const auto described = describe_dataset(input().string());
  EXPECT_EQ(described.at("columns").size(), 2U) << described;
  EXPECT_EQ(described.at("advice"), Json::array());
  run();
  EXPECT_EQ(describe_dataset(output().string()).at("columns").size(), 2U)
      << "no groups, no single values, no dimensions without a variable and no types";
  run({.columns = {"y"}}, ":/g");
  EXPECT_EQ(values<std::int64_t>(output(), "y"), (std::vector<std::int64_t>{3, 4, 5, 6, 7}));
  EXPECT_EQ(describe_dataset(output().string()).at("columns").size(), 1U);
}

TEST_F(ConvertH5, CopiesFieldsOfCompoundValues) {
  struct Particle {
    double mass;
    std::int16_t kind;
  };
  const hdf5::Handle type(H5Tcreate(H5T_COMPOUND, sizeof(Particle)), H5Tclose);
  H5Tinsert(type.get(), "mass", offsetof(Particle, mass), H5T_IEEE_F64BE);
  H5Tinsert(type.get(), "kind", offsetof(Particle, kind), H5T_NATIVE_INT16);
  const hdf5::Handle native(H5Tcreate(H5T_COMPOUND, sizeof(Particle)), H5Tclose);
  H5Tinsert(native.get(), "mass", offsetof(Particle, mass), H5T_NATIVE_DOUBLE);
  H5Tinsert(native.get(), "kind", offsetof(Particle, kind), H5T_NATIVE_INT16);
  std::vector<Particle> particles(200'000);  // more than a piece
  for (std::size_t i = 0; i < particles.size(); ++i)
    particles[i] = {static_cast<double>(i) / 4, static_cast<std::int16_t>(i % 1000)};
  for (const auto& layout : {Layout{}, Layout{.chunk = 700}, Layout{.chunk = 700, .deflate = 1}}) {
    H5File(input()).dataset("q", {100'000, 2}, type.get(), native.get(), particles.data(), layout);
    EXPECT_NE(describe_dataset(input().string()).at("advice").dump().find("fields of it as columns: q.mass, q.kind"),
              std::string::npos);
    EXPECT_NE(refusal(ExitCode::data).find("fields of it as columns: q.mass, q.kind"), std::string::npos);
    run({.columns = {"q.kind", "q.mass"}});
    const auto mass = values<double>(output(), "q.mass");
    const auto kind = values<std::int16_t>(output(), "q.kind");
    ASSERT_EQ(mass.size(), particles.size());
    for (std::size_t i = 0; i < mass.size(); ++i)
      ASSERT_TRUE(mass[i] == particles[i].mass && kind[i] == particles[i].kind) << i;
    EXPECT_EQ(described(output()).at("reader"), "direct");
    run({.columns = {"q.kind", "q.mass"}, .shuffle = 3});
    const auto shuffled = values<double>(output(), "q.mass");
    const auto kinds = values<std::int16_t>(output(), "q.kind");
    EXPECT_NE(shuffled, mass);
    for (std::size_t i = 0; i < mass.size(); ++i)
      ASSERT_EQ(kinds[i], static_cast<std::int16_t>(static_cast<std::int64_t>(4 * shuffled[i]) % 1000));
    std::filesystem::remove(output());
  }
}

TEST_F(ConvertH5, AdvisesACommandThatWorks) {
  {
    H5File file(input());
    file.columns(10, 0, {.chunk = 5, .deflate = 1});
    file.dataset("names", {10}, H5T_C_S1, H5T_C_S1, nullptr);
  }
  const auto command = [&](const std::string& path) {
    return describe_dataset(path).at("convert").at("command").get<std::string>();
  };
  EXPECT_EQ(command(input().string()), "muster convert h5 " + input().string() + " OUT.h5 --columns x,y");
  run({.columns = {"x", "y"}});
  EXPECT_TRUE(measure_dataset(input().string()).at("converted").is_object());
  for (const std::string name : {"a,b", "-x"}) {
    {
      H5File file(input());
      file.dataset(name, {10, 3}, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, test::counting<float>(30).data(),
                   {.chunk = 5, .deflate = 1});
      file.dataset("names", {10}, H5T_C_S1, H5T_C_S1, nullptr);
    }
    const auto text = describe_dataset(input().string()).dump();
    EXPECT_EQ(text.find("OUT.h5 --columns=-x") != std::string::npos, name == "-x");
    EXPECT_EQ(text.find("OUT.h5") != std::string::npos, name == "-x") << "--columns takes a,b for two";
  }
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.file(""));
  H5File("-c.h5").columns(10, 0, {.chunk = 5, .deflate = 1});
  EXPECT_EQ(command("-c.h5"), "muster convert h5 ./-c.h5 OUT.h5");
  std::filesystem::current_path(before);
}

TEST_F(ConvertH5, SplitsAndShufflesAsOtherFormatsDo) {
  const auto numbers = counting(1000);
  for (const auto& layout : {Layout{}, Layout{.chunk = 64}, Layout{.chunk = 64, .deflate = 1}}) {
    H5File(input()).dataset("x", {1000}, H5T_STD_I32LE, H5T_NATIVE_INT32, numbers.data(), layout);
    const ConvertOptions options{.chunk = 50, .split = {{"a", 0.3}, {"b", 0.7}}, .shuffle = 42};
    run(options);
    const auto a = values<std::int32_t>(output("a"), "x"), b = values<std::int32_t>(output("b"), "x");
    convert_idx({write("idx", test::idx(0x0C, {1000}, numbers))}, folder / "idx.h5", options);
    EXPECT_EQ(a, values<std::int32_t>(folder / "idx.a.h5", "x"));
    EXPECT_EQ(b, values<std::int32_t>(folder / "idx.b.h5", "x"));
    EXPECT_EQ(a.size(), 300U);
  }
}

TEST_F(ConvertH5, KeepsSoManyOfEachClass) {
  {
    H5File file(input());
    Ints classes;
    for (int i = 0; i < 100; ++i) classes.push_back(i % 4);
    file.dataset("x", {100}, H5T_STD_I32LE, H5T_NATIVE_INT32, counting(100).data(), {.chunk = 8, .deflate = 1});
    file.dataset("y", {100}, H5T_STD_I32BE, H5T_NATIVE_INT32, classes.data());
  }
  run({.per_class = 2});
  EXPECT_EQ(values<std::int32_t>(output(), "x"), counting(8));
  EXPECT_EQ(values<std::int32_t>(output(), "y"), (Ints{0, 1, 2, 3, 0, 1, 2, 3}));
}

TEST_F(ConvertH5, GathersFewRowsOfManyAndManyOfFew) {
  // Rows of 40 KB: a piece has few of them, and most pieces are needed for some.
  constexpr int count = 300, large = 10'000;
  Ints all(static_cast<std::size_t>(count * large));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int32_t>(i / large);
  for (const auto& layout : {Layout{}, Layout{.chunk = 50, .deflate = 1}}) {
    H5File(input()).dataset("x", {count, large}, H5T_STD_I32LE, H5T_NATIVE_INT32, all.data(), layout);
    run({.split = {{"a", 0.01}, {"b", 0.99}}, .shuffle = 3});
    Ints found;
    for (const auto* part : {"a", "b"}) {
      const auto x = values<std::int32_t>(output(part), "x");
      for (std::size_t i = 0; i < x.size(); i += large) {
        EXPECT_EQ(std::ranges::count(std::span(x).subspan(i, large), x[i]), large);
        found.push_back(x[i]);
      }
    }
    EXPECT_FALSE(std::ranges::is_sorted(found));
    std::ranges::sort(found);
    EXPECT_EQ(found, counting(count));
  }
}

TEST_F(ConvertH5, FillsWhatWasNeverWritten) {
  const hdf5::Lock lock;
  {
    H5File file(input());
    const hdf5::Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    const hsize_t chunk[] = {4}, shape[] = {20}, start[] = {5}, one[] = {1};
    const std::int32_t fill = 7, value = 1;
    H5Pset_chunk(creation.get(), 1, chunk);
    H5Pset_deflate(creation.get(), 1);
    H5Pset_fill_value(creation.get(), H5T_NATIVE_INT32, &fill);
    const hdf5::Handle space(H5Screate_simple(1, shape, nullptr), H5Sclose);
    const hdf5::Handle memory(H5Screate_simple(1, one, nullptr), H5Sclose);
    const hdf5::Handle x(
        H5Dcreate2(file.id(), "x", H5T_STD_I32BE, space.get(), H5P_DEFAULT, creation.get(), H5P_DEFAULT), H5Dclose);
    H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, start, nullptr, one, nullptr);
    ASSERT_GE(H5Dwrite(x.get(), H5T_NATIVE_INT32, memory.get(), space.get(), H5P_DEFAULT, &value), 0);
    file.dataset("y", {20}, H5T_STD_I32LE, H5T_NATIVE_INT32, nullptr);
  }
  run();
  Ints expected(20, 7);
  expected[5] = 1;
  EXPECT_EQ(values<std::int32_t>(output(), "x"), expected);
  EXPECT_EQ(values<std::int32_t>(output(), "y"), Ints(20, 0));
}

TEST_F(ConvertH5, SaysThatAColumnBehindAUserBlockWasNeverWritten) {
  H5File(input(), 512).dataset("x", {rows, width}, H5T_STD_I32LE, H5T_NATIVE_INT32, nullptr);
  const auto dataset = describe_dataset(input().string());
  EXPECT_EQ(dataset.at("columns").at(0).at("reader"), "hdf5");
  EXPECT_EQ(dataset.at("columns").at(0).at("offset"), nullptr);
  EXPECT_NE(dataset.at("advice").dump().find("x: nothing was ever written to it"), std::string::npos);
  run();
  EXPECT_EQ(values<std::int32_t>(output(), "x"), Ints(rows * width, 0));
}

TEST_F(ConvertH5, KeepsAttributes) {
  const hdf5::Lock lock;
  make({.chunk = 10});
  {
    const hdf5::Handle file(H5Fopen(input().c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose);
    const hdf5::Handle x(H5Dopen2(file.get(), "x", H5P_DEFAULT), H5Dclose);
    const auto add = [&](const char* name, hid_t type, std::vector<std::int64_t> shape, const void* value) {
      const auto space = hdf5::make_space(shape, "fixture");
      const hdf5::Handle one(H5Acreate2(x.get(), name, type, space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
      ASSERT_GE(H5Awrite(one.get(), type, value), 0);
    };
    const double scale = 0.25;
    const std::int16_t range[] = {-3, 300};
    const char* text = "metres";
    hdf5::Handle fixed(H5Tcopy(H5T_C_S1), H5Tclose), variable(H5Tcopy(H5T_C_S1), H5Tclose);
    H5Tset_size(fixed.get(), 7), H5Tset_size(variable.get(), H5T_VARIABLE);
    add("scale_factor", H5T_NATIVE_DOUBLE, {}, &scale);
    add("valid_range", H5T_STD_I16LE, {2}, range);
    add("units", fixed.get(), {}, text);
    add("long_name", variable.get(), {}, &text);
    const auto is_good = detail::hdf5::memory_type_of(at::kBool);
    const std::int8_t yes = 1;
    add("is_good", is_good.get(), {}, &yes);
    add("classes", variable.get(), {1000}, std::vector<const char*>(1000, text).data());
    const std::vector<std::byte> zeros(std::size_t{1} << 15);
    add("opaque", hdf5::Handle(H5Tcreate(H5T_OPAQUE, 8), H5Tclose).get(), {4}, zeros.data());
  }
  testing::internal::CaptureStderr();
  run({.compress = 1});
  detail::log::flush();
  const auto said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("the attribute opaque of"), std::string::npos) << said;
  EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
  const auto file = hdf5::open_file(output());
  const auto x = hdf5::open_dataset(file.get(), "x", "x");
  const auto read = [&](const char* name, hid_t type, void* into) {
    const hdf5::Handle one(H5Aopen(x.get(), name, H5P_DEFAULT), H5Aclose);
    ASSERT_GE(H5Aread(one.get(), type, into), 0) << name;
  };
  double scale = 0;
  read("scale_factor", H5T_NATIVE_DOUBLE, &scale);
  EXPECT_EQ(scale, 0.25);
  std::array<std::int16_t, 2> range{};
  read("valid_range", H5T_NATIVE_INT16, range.data());
  EXPECT_EQ(range, (std::array<std::int16_t, 2>{-3, 300}));
  std::array<char, 7> units{};
  hdf5::Handle fixed(H5Tcopy(H5T_C_S1), H5Tclose), variable(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(fixed.get(), 7), H5Tset_size(variable.get(), H5T_VARIABLE);
  read("units", fixed.get(), units.data());
  EXPECT_STREQ(units.data(), "metres");
  char* name = nullptr;
  read("long_name", variable.get(), &name);
  EXPECT_STREQ(name, "metres");
  H5free_memory(name);
  std::int8_t good = 0;
  read("is_good", hdf5::memory_type_of(at::kBool).get(), &good);
  EXPECT_EQ(good, 1);
  std::vector<char*> classes(1000);
  read("classes", variable.get(), classes.data());
  for (auto* one : classes) {
    EXPECT_STREQ(one, "metres");
    H5free_memory(one);
  }
  EXPECT_EQ(H5Aexists(x.get(), "opaque"), 0) << "neither numbers nor strings";
}

TEST_F(ConvertH5, CopiesEnumerationsOfAttributesAsIntegers) {
  const hdf5::Lock lock;
  const std::uint16_t values[] = {1, 300}, none = 300;
  {
    H5File file(input());
    const hdf5::Handle kind(H5Tenum_create(H5T_STD_U16BE), H5Tclose);
    for (const auto& [name, value] : {std::pair<const char*, std::uint16_t>("land", 0x0100), {"none", 0x2c01}})
      H5Tenum_insert(kind.get(), name, &value);  // 1 and 300, in the file's byte order
    const hdf5::Handle native(H5Tget_native_type(kind.get(), H5T_DIR_DEFAULT), H5Tclose);
    H5Tcommit2(file.id(), "kind", kind.get(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    file.dataset("x", {2}, kind.get(), native.get(), values);
    const hdf5::Handle x(H5Dopen2(file.id(), "x", H5P_DEFAULT), H5Dclose);
    const auto add = [&](const char* name, const std::vector<std::int64_t>& shape, const void* value) {
      const auto space = hdf5::make_space(shape, "fixture");
      const hdf5::Handle one(H5Acreate2(x.get(), name, kind.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
      ASSERT_GE(H5Awrite(one.get(), native.get(), value), 0);
    };
    add("_FillValue", {1}, &none);
    add("missing_value", {}, &none);
    add("valid_range", {2}, values);
  }
  run();
  const auto file = hdf5::open_file(output());
  const auto x = hdf5::open_dataset(file.get(), "x", "x");
  for (const auto& [name, wanted] :
       {std::pair<const char*, Ints>("_FillValue", {300}), {"missing_value", {300}}, {"valid_range", {1, 300}}}) {
    const hdf5::Handle one(H5Aopen(x.get(), name, H5P_DEFAULT), H5Aclose), type(H5Aget_type(one.get()), H5Tclose);
    EXPECT_GT(H5Tequal(type.get(), H5T_STD_U16BE), 0) << name;
    Ints found(wanted.size());
    ASSERT_GE(H5Aread(one.get(), H5T_NATIVE_INT32, found.data()), 0) << name;
    EXPECT_EQ(found, wanted) << name;
  }
}

/// The values of all windows of the variables, sorted, since their order is that of the chunks.
std::vector<std::string> windows_of(const std::vector<std::string>& variables,
                                    const std::vector<std::int64_t>& size = {2, 3}) {
  const auto data = Dataset::windows(variables, {.size = size});
  std::vector<std::int64_t> all(static_cast<std::size_t>(data.count()));
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::string> windows(all.size());
  for (const auto& [name, values] : data.read(all))
    for (std::size_t i = 0; i < windows.size(); ++i) {
      const auto window = values[static_cast<std::int64_t>(i)].flatten();
      windows[i] += name + ":";
      for (std::int64_t j = 0; j < window.numel(); ++j) windows[i] += " " + std::to_string(window[j].item<double>());
      windows[i] += "; ";
    }
  std::ranges::sort(windows);
  return windows;
}

TEST_F(ConvertH5, KeepsTheNamesOfDimensions) {
  const hsize_t size = 6;
  {
    H5File file(input());
    const auto numbers = counting(36);
    for (const auto* name : {"height", "t"})
      file.dataset(name, {size, size}, H5T_STD_I32BE, H5T_NATIVE_INT32, numbers.data(), {.chunk = 4, .deflate = 1});
    file.name_dimensions("t", {"latitude", "longitude"});
    file.name_dimensions("height", {"longitude", "latitude"});
  }
  const auto t = input().string() + ":/t", height = input().string() + ":/height";
  const auto copied_t = output().string() + ":/t", copied_height = output().string() + ":/height";
  const auto wanted = windows_of({t, height});
  for (const auto& options : outputs) {
    run(options);
    EXPECT_EQ(windows_of({copied_t, copied_height}), wanted);
    EXPECT_EQ(windows_of({t, copied_height}), wanted) << "one variable of the original";
    EXPECT_EQ(windows_of({copied_t, height}), wanted);
    EXPECT_EQ(Dataset(output()).schema().size(), 2u) << "dimensions are no columns";
  }
  // The samples are latitudes for one column and longitudes for the other, so other ones give each name two meanings.
  run({.shuffle = 3});
  EXPECT_NE(message(ExitCode::data,
                    [&] {
                      windows_of({copied_t, copied_height});
                    })
                .find("Name the dimensions"),
            std::string::npos);
}

TEST_F(ConvertH5, WindowsOfRandomCopiesAreThoseOfTheOriginal) {
  std::mt19937 random(9);
  const auto upto = [&](std::size_t most) { return 1 + random() % most; };
  for (std::size_t round = 0; round < 60; ++round) {
    const hsize_t size = upto(4);  // of all dimensions, so that only their names tell them apart
    std::vector<std::string> all{"x", "y", "z"}, some = all;
    std::shuffle(some.begin(), some.end(), random);
    all.resize(upto(3));
    std::erase_if(some, [&](const auto& name) { return std::ranges::count(all, name) == 0; });
    some.resize(upto(some.size()));
    {
      H5File file(input());
      for (const auto& [name, names] : {std::pair("a", all), std::pair("b", some)}) {
        const auto values = counting(static_cast<int>(std::pow(size, names.size())));
        file.dataset(name, std::vector<hsize_t>(names.size(), size), H5T_STD_I16LE, H5T_NATIVE_INT32, values.data(),
                     {.chunk = round % 3 == 0 ? upto(size) : 0});
      }
      file.name_dimensions("a", all);
      file.name_dimensions("b", some);
    }
    run(outputs[round % outputs.size()]);
    std::vector<std::int64_t> window;
    for (std::size_t d = 0; d < all.size(); ++d) window.push_back(static_cast<std::int64_t>(upto(size)));
    const auto in = input().string(), out = output().string();
    const auto wanted = windows_of({in + ":/a", in + ":/b"}, window);
    for (const auto& [first, second] : {std::pair(in, out), std::pair(out, in), std::pair(out, out)})
      EXPECT_EQ(windows_of({first + ":/a", second + ":/b"}, window), wanted) << round;
  }
}

TEST_F(ConvertH5, KeepsTheNamesOfDimensionsInEachSplit) {
  {
    H5File file(input());
    file.dataset("t", {10, 4, 4}, H5T_STD_I32LE, H5T_NATIVE_INT32, counting(160).data());
    file.dataset("time", {10}, H5T_STD_I32LE, H5T_NATIVE_INT32, counting(10).data());
    file.text_attribute("time", "CLASS", "DIMENSION_SCALE");
    file.text_attribute("time", "NAME", "time");
    file.dataset("cov", {10, 10}, H5T_STD_I32LE, H5T_NATIVE_INT32, counting(100).data());
    file.name_dimensions("t", {"time", "y", "x"});
    file.name_dimensions("cov", {"station", "station"});
  }
  run({.split = {{"a", 0.6}, {"b", 0.4}}, .shuffle = 5});
  const hdf5::Lock lock;
  for (const auto& [part, count] : {std::pair("a", 6), std::pair("b", 4)}) {
    const auto file = hdf5::open_file(output(part));
    const auto names = [&](const char* column, std::size_t rank) {
      const auto dataset = hdf5::open_dataset(file.get(), column, column);
      return hdf5::dimension_names(dataset.get(), rank, column);
    };
    EXPECT_EQ(names("t", 3), (std::vector<std::string>{"time", "y", "x"}));
    EXPECT_EQ(names("cov", 2), (std::vector<std::string>{"", ""})) << "one dimension is split and the other is not";
    const auto time = hdf5::open_dataset(file.get(), "time", "time");
    EXPECT_EQ(hdf5::shape(time.get()), std::vector<std::int64_t>{count});
    EXPECT_GT(H5Aexists(time.get(), "REFERENCE_LIST"), 0);
    EXPECT_EQ(values<std::int32_t>(output(part), "time").size(), static_cast<std::size_t>(count));
    for (const auto* name : {"x", "y"}) {
      EXPECT_FALSE(hdf5::is_column(file.get(), name, name));
      const auto dimension = hdf5::open_dataset(file.get(), name, name);
      EXPECT_EQ(hdf5::shape(dimension.get()), std::vector<std::int64_t>{4});
      EXPECT_EQ(hdf5::text_of_attribute(dimension.get(), "NAME", "test"),
                "This is a netCDF dimension but not a netCDF variable.         4")
          << "to the letter; netCDF takes another text for a variable";
    }
  }
}

/// The names of a column's dimensions, and whether NetCDF opens a file with it: a scale of several dimensions numbers
/// them, another column does not, and none has a name for its first dimension alone.
std::vector<std::string> netcdf_names(hid_t file, const std::string& column) {
  const auto dataset = hdf5::open_dataset(file, column, column);
  const auto rank = hdf5::shape(dataset.get()).size();
  const bool is_scale = H5Aexists(dataset.get(), "CLASS") > 0;
  const auto numbers = hdf5::numbers_of_attribute(dataset.get(), "_Netcdf4Coordinates", "test");
  EXPECT_EQ(numbers.size(), is_scale && rank > 1 ? rank : 0) << column;
  EXPECT_TRUE(is_scale || H5Aexists(dataset.get(), "_Netcdf4Dimid") == 0) << column;
  const auto scales = hdf5::scales_of(dataset.get(), rank, column);
  std::vector<std::string> names;
  for (std::size_t d = 0; d < rank; ++d) {
    names.push_back(scales[d].name());
    EXPECT_TRUE(numbers.size() <= d || scales[d].number == static_cast<std::int32_t>(numbers[d])) << column;
  }
  EXPECT_TRUE(names.front().empty() || std::ranges::count(names, "") == 0) << column;
  return names;
}

TEST_F(ConvertH5, NumbersDimensionsAsTheCopyHasThem) {
  using Names = std::vector<std::string>;
  const auto make_file = [&](hsize_t others, bool has_matrix) {
    H5File file(input());
    const auto values = counting(static_cast<int>(6 * others));
    for (const std::string name : {"time", "t"})
      file.dataset(name, {6, others}, H5T_STD_I32LE, H5T_NATIVE_INT32, values.data());
    for (const auto& [name, number] : {std::pair("nv", 1), std::pair("x", 2)}) {
      file.only_dimension(name, others);
      file.numbers_attribute(name, "_Netcdf4Dimid", {number});
    }
    file.make_scale("time", {0, 1});
    file.name_dimensions("t", {"time", "x"});
    file.numbers_attribute("t", "_Netcdf4Dimid", {0});
    file.numbers_attribute("t", "_Netcdf4Coordinates", {0, 2});
    if (!has_matrix) return;
    file.dataset("matrix", {6, others}, H5T_STD_I32LE, H5T_NATIVE_INT32, values.data());
    file.name_dimensions("matrix", {"nv", "x"});
  };
  const hdf5::Lock lock;
  make_file(2, false);
  for (const auto& options :
       std::vector<ConvertOptions>{{}, {.shuffle = 1}, {.columns = {"time"}}, {.columns = {"t"}}}) {
    run(options);
    const auto file = hdf5::open_file(output());
    for (const auto& name : options.columns.empty() ? Names{"time", "t"} : options.columns)
      EXPECT_EQ(netcdf_names(file.get(), name), Names({"time", name == "t" ? "x" : "nv"}));
  }
  make_file(6, true);
  run();
  EXPECT_EQ(netcdf_names(hdf5::open_file(output()).get(), "time"), Names({"time", "nv"}));
  run({.shuffle = 1});
  const auto file = hdf5::open_file(output());
  EXPECT_EQ(netcdf_names(file.get(), "time"), Names({"", ""})) << "nv is that of the samples in one place alone";
  EXPECT_EQ(netcdf_names(file.get(), "t"), Names({"", "x"}));
  EXPECT_EQ(netcdf_names(file.get(), "matrix"), Names({"", "x"}));
}

TEST_F(ConvertH5, NamesNoFirstDimensionAlone) {
  using Names = std::vector<std::string>;
  const hdf5::Lock lock;
  {
    H5File file(input());
    file.group("g");
    for (const std::string name : {"u", "v", "g/t"})
      file.dataset(name, {4, 4}, H5T_STD_I32LE, H5T_NATIVE_INT32, counting(16).data());
    for (const std::string name : {"time", "g/time"})
      file.dataset(name, {4}, H5T_STD_I32LE, H5T_NATIVE_INT32, counting(4).data());
    file.text_attribute("time", "CLASS", "DIMENSION_SCALE");
    file.name_dimensions("u", {"a", "b"});
    file.name_dimensions("v", {"b", "c"});
    file.name_dimensions("g/time", {"a"});
    file.name_dimensions("g/t", {"a", "time"});
  }
  run({.columns = {"u", "v"}, .shuffle = 1});
  auto file = hdf5::open_file(output());
  EXPECT_EQ(netcdf_names(file.get(), "u"), Names({"", ""}));
  EXPECT_EQ(netcdf_names(file.get(), "v"), Names({"", "c"}));
  testing::internal::CaptureStderr();
  run({}, ":/g");
  detail::log::flush();
  const auto said = testing::internal::GetCapturedStderr();
  file = hdf5::open_file(output());
  EXPECT_EQ(netcdf_names(file.get(), "t"), Names({"", ""})) << "the column time is not the dimension of that name";
  EXPECT_EQ(netcdf_names(file.get(), "time"), Names({"a"}));
  EXPECT_NE(said.find("the dimension /time has no name in the copy"), std::string::npos) << said;
  EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
}

TEST_F(ConvertH5, NamesADimensionByTheColumnOfAGroupAlongIt) {
  using Names = std::vector<std::string>;
  const hdf5::Lock lock;
  for (const auto& dimensions : {Names{"time"}, Names{"time", "nv"}}) {
    {
      H5File file(input());
      file.group("g");
      for (const auto& [name, names] : {std::pair("g/time", dimensions), {"g/t", Names{"time", "x"}}}) {
        file.dataset(name, std::vector<hsize_t>(names.size(), 4), H5T_STD_I32LE, H5T_NATIVE_INT32, counting(16).data());
        file.name_dimensions(name, names);
      }
      for (std::int32_t d = 0; d < std::ssize(dimensions); ++d)
        file.numbers_attribute(dimensions[static_cast<std::size_t>(d)], "_Netcdf4Dimid", {d});
    }
    for (const auto& options : std::vector<ConvertOptions>{{}, {.shuffle = 1}, {.columns = {"t"}}}) {
      run(options, ":/g");
      const auto file = hdf5::open_file(output());
      const bool has_time = options.columns.empty();
      EXPECT_EQ(netcdf_names(file.get(), "t"), Names({"time", "x"}));
      EXPECT_EQ(netcdf_names(file.get(), "time"), has_time ? dimensions : Names{"time"});
      EXPECT_EQ(hdf5::is_column(file.get(), "time", "time"), has_time);
    }
  }
}

TEST_F(ConvertH5, DecodesEachChunkOnce) {
  // Chunks and the pieces that are written do not begin at the same rows.
  constexpr int count = 3'000'000;
  Ints noise(count);
  for (int i = 0; i < count; ++i)
    noise[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(2654435761U * static_cast<unsigned>(i));
  H5File(input()).dataset("x", {count / 3, 3}, H5T_STD_I32LE, H5T_NATIVE_INT32, noise.data(),
                          {.chunk = 70'001, .deflate = 1, .inner_chunk = 2});
  const auto before = bytes_read();
  run({.chunk = 1000});
  const auto read = bytes_read() - before, size = std::filesystem::file_size(input());
  EXPECT_GT(read, size / 2);
  EXPECT_LT(read, size + size / 4);
  EXPECT_EQ(values<std::int32_t>(output(), "x"), noise);
}

TEST_F(ConvertH5, PlainPassReadsTheChunksOfItsSamples) {
  constexpr int count = 1'000'000;
  Ints noise(count);
  for (int i = 0; i < count; ++i)
    noise[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(2654435761U * static_cast<unsigned>(i));
  H5File(input()).dataset("x", {count / 4, 4}, H5T_STD_I32LE, H5T_NATIVE_INT32, noise.data(),
                          {.chunk = 1000, .deflate = 1});
  const auto bytes_of = [&](std::int64_t samples) {
    const auto pass = plain_pass(input().string(), {"x"}, samples);
    const auto before = bytes_read();
    pass();
    return static_cast<double>(bytes_read() - before) / static_cast<double>(std::filesystem::file_size(input()));
  };
  EXPECT_NEAR(bytes_of(count / 4), 1, 0.1);
  EXPECT_NEAR(bytes_of(count / 8), 0.5, 0.2);  // it reads whole megabytes
  EXPECT_NEAR(bytes_of(count), 1, 0.1);        // more than there are
  const auto unknown = message(ExitCode::data, [&] { plain_pass(input().string(), {"y"}, 1); });
  EXPECT_NE(unknown.find("no dataset \"y\""), std::string::npos) << unknown;
}

TEST_F(ConvertH5, NeedsLittleMemory) {
  constexpr hsize_t samples = 300'000;  // of 1 KB
  {
    H5File file(input());
    file.dataset("plain", {samples, 1024}, H5T_STD_I8LE, H5T_NATIVE_INT8, nullptr);
    file.dataset("packed", {samples, 1024}, H5T_STD_I8LE, H5T_NATIVE_INT8, nullptr, {.chunk = 5000, .deflate = 1});
  }
  const auto copy = [&] {
    std::ifstream status("/proc/self/status");
    std::uint64_t kilobytes = 0;
    for (std::string word; status >> word;)
      if (word == "VmSize:") status >> kilobytes;
    const rlimit limit{(kilobytes << 10) + (100 << 20), RLIM_INFINITY};
    ::setrlimit(RLIMIT_AS, &limit);
    run({.columns = {"plain"}});
    run({.columns = {"packed"}, .chunk = 100});
    std::_Exit(0);  // the folders of other tests stay
  };
  EXPECT_EXIT(copy(), testing::ExitedWithCode(0), "");
}

TEST_F(ConvertH5, RefusesWhatItCannotCopy) {
  {
    H5File file(input());
    file.group("empty");
    file.columns(10);
    file.dataset("z", {9}, H5T_STD_I32LE, H5T_NATIVE_INT32, counting(9).data());
    file.dataset("none", {0, 3}, H5T_STD_I32LE, H5T_NATIVE_INT32, nullptr);
    file.dataset("flat", {10, 0}, H5T_STD_I32LE, H5T_NATIVE_INT32, nullptr);
    file.dataset("huge", {2, std::uint64_t{1} << 40}, H5T_STD_I32LE, H5T_NATIVE_INT32, nullptr);
    file.dataset("single", {}, H5T_STD_I32LE, H5T_NATIVE_INT32, counting(1).data());
    file.dataset("s", {10}, H5T_C_S1, H5T_C_S1, nullptr);
  }
  const auto refused = [&](std::vector<std::string> columns) {
    return refusal(ExitCode::data, {.columns = std::move(columns)});
  };
  EXPECT_NE(refused({"x", "z"}).find("z has 9"), std::string::npos);
  EXPECT_NE(refused({"none"}).find("it holds no sample"), std::string::npos);
  EXPECT_NE(refused({"flat"}).find("no values"), std::string::npos);
  EXPECT_NE(refused({"huge"}).find("the most are 1 GiB"), std::string::npos);
  EXPECT_NE(refused({"single"}).find("a single value, not a column"), std::string::npos);
  EXPECT_NE(refused({"s"}).find("it holds strings"), std::string::npos);
  EXPECT_NE(refused({"missing"}).find("no dataset \"missing\""), std::string::npos);
  EXPECT_NE(refused({"empty"}).find("is not a dataset"), std::string::npos);
  EXPECT_NE(refusal(ExitCode::data, {}, ":/empty").find("holds no datasets"), std::string::npos);
  EXPECT_NE(refusal(ExitCode::data, {}, ":/nowhere").find("no group"), std::string::npos);
  EXPECT_NE(refusal(ExitCode::usage, {.columns = {"x", "x"}}).find("comes twice"), std::string::npos);
  EXPECT_NE(message(ExitCode::usage,
                    [&] {
                      convert_h5({input(), input()}, output());
                    })
                .find("2 inputs are given, and one HDF5 file is copied"),
            std::string::npos);
  const auto onto_itself = [&] { convert_h5({input().string() + ":/"}, input(), {.columns = {"x"}}); };
  EXPECT_NE(message(ExitCode::usage, onto_itself).find("it is one of the inputs"), std::string::npos);
  write("text", "no HDF5");
  EXPECT_NE(message(ExitCode::data, [&] { convert_h5({folder / "text"}, output()); }).find("not an HDF5 file"),
            std::string::npos);
}

TEST_F(ConvertH5, RefusesDamagedChunks) {
  make({.chunk = 10, .deflate = 6});
  auto content = detail::read_file(input());
  const auto header = content.find("\x78\x9c");  // of zlib's stream
  ASSERT_NE(header, std::string::npos);
  content[header + 4] ^= 0x55;
  content[header + 9] ^= 0x55;
  write("in.h5", content);
  EXPECT_NE(refusal(ExitCode::data).find("do not decode to"), std::string::npos);
}

TEST_F(ConvertH5, SaysHowColumnsAreRead) {
  const auto described_as = [&](const char* reader, const std::string& advice) {
    const auto dataset = describe_dataset(input().string());
    EXPECT_EQ(dataset.at("columns").at(0).at("reader"), reader);
    const auto lines = dataset.at("advice").dump();
    EXPECT_NE(lines.find(advice), std::string::npos) << lines;
    EXPECT_EQ(dataset.at("advice").empty(), advice.empty()) << lines;
    return dataset.at("convert");
  };
  make({});
  EXPECT_EQ(described_as("direct", ""), nullptr);
  make({.chunk = 10});
  EXPECT_EQ(described_as("direct", ""), nullptr);
  make({.compact = true});
  EXPECT_EQ(described_as("hdf5", ""), nullptr);
  make({.chunk = 10, .deflate = 6});
  EXPECT_EQ(described_as("decoded", "x: the first pass decodes or converts them").at("command"),
            "muster convert h5 " + input().string() + " OUT.h5");
  make({.chunk = 10, .inner_chunk = 2});
  EXPECT_TRUE(described_as("direct", "spread over several chunks").is_object());
  make({}, H5T_STD_I32BE);
  EXPECT_EQ(described_as("direct", ""), nullptr);
  H5File(input()).dataset("x", {10}, H5T_STD_U16LE, H5T_NATIVE_INT32, counting(10).data());
  EXPECT_EQ(described_as("direct", ""), nullptr);
  const hdf5::Handle narrow(H5Tcopy(H5T_STD_I32LE), H5Tclose);
  H5Tset_precision(narrow.get(), 20);
  make({}, narrow.get());
  EXPECT_TRUE(described_as("hdf5", "x: its values have an unusual form, so HDF5").is_object());
  H5File(input()).dataset("x", {100, 100'000}, H5T_STD_I32LE, H5T_NATIVE_INT32, counting(10'000'000).data(),
                          {.chunk = 50, .deflate = 1});
  const auto smaller = described_as("decoded", "a chunk is 19 MiB and is decoded whole");
  EXPECT_EQ(smaller.at("chunk"), 1);
  EXPECT_EQ(smaller.at("compress"), 1);
}

TEST_F(ConvertH5, SaysWhichMissingValuesStayNumbers) {
  const auto advice = [&](hid_t stored, const char* name, bool is_whole) {
    {
      const hdf5::Lock lock;
      H5File file(input());
      const hdf5::Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
      const hsize_t chunk[] = {4}, shape[] = {20}, start[] = {5}, one[] = {1};
      const std::int32_t value = 1;
      H5Pset_chunk(creation.get(), 1, chunk);
      H5Pset_deflate(creation.get(), 1);
      const hdf5::Handle space(H5Screate_simple(1, shape, nullptr), H5Sclose);
      const hdf5::Handle memory(H5Screate_simple(1, one, nullptr), H5Sclose);
      file.create("x", stored, H5T_NATIVE_INT32, space.get(), creation.get(), is_whole ? counting(20).data() : nullptr);
      const hdf5::Handle x(H5Dopen2(file.id(), "x", H5P_DEFAULT), H5Dclose);
      H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, start, nullptr, one, nullptr);
      EXPECT_GE(H5Dwrite(x.get(), H5T_NATIVE_INT32, memory.get(), space.get(), H5P_DEFAULT, &value), 0);
      if (name != nullptr) file.text_attribute("x", name, "-9999");
    }
    return describe_dataset(input().string()).at("advice").dump();
  };
  const std::string stay = "its missing values stay the numbers that they are",
                    unwritten = "some of its chunks were never written", no_nan = "which is no NaN";
  const auto has = [](const std::string& text, const std::string& part) { return text.find(part) != text.npos; };
  EXPECT_TRUE(has(advice(H5T_STD_I32LE, "missing_value", true), stay));
  EXPECT_TRUE(has(advice(H5T_STD_I32LE, "valid_max", true), stay));
  EXPECT_FALSE(has(advice(H5T_IEEE_F32LE, "missing_value", true), stay));
  EXPECT_FALSE(has(advice(H5T_STD_I32LE, nullptr, true), stay));
  EXPECT_TRUE(
      has(advice(H5T_IEEE_F32LE, nullptr, false), unwritten + "; their values read as the fill value, " + no_nan));
  EXPECT_TRUE(has(advice(H5T_IEEE_F32LE, "_FillValue", false), unwritten));
  EXPECT_FALSE(has(advice(H5T_IEEE_F32LE, "_FillValue", false), no_nan));
  EXPECT_TRUE(has(advice(H5T_IEEE_F32LE, "missing_value", false), no_nan)) << "they read as 0, which is no -9999";
  EXPECT_FALSE(has(advice(H5T_IEEE_F32LE, nullptr, true), unwritten));
  for (const auto& [rows, columns] : {std::pair<hsize_t, hsize_t>{0, 3}, {5, 0}}) {
    H5File(input()).dataset("x", {rows, columns}, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, nullptr);
    EXPECT_FALSE(has(describe_dataset(input().string()).at("advice").dump(), "written")) << "there is nothing to write";
  }
}

TEST_F(ConvertH5, SaysWhichFiltersAreMissing) {
  const auto unknown = [&](H5Z_filter_t filter, hid_t type) {
    {
      const hdf5::Lock lock;
      H5File file(input());
      const hdf5::Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
      const hsize_t sizes[] = {10};
      H5Pset_chunk(creation.get(), 1, sizes);
      // HDF5 sets no filter that it does not have, unless it may be left out.
      H5Pset_filter(creation.get(), filter, H5Z_FLAG_OPTIONAL, 0, nullptr);
      const hdf5::Handle space(H5Screate_simple(1, sizes, nullptr), H5Sclose);
      file.create("x", type, H5T_NATIVE_INT32, space.get(), creation.get(), counting(10).data());
    }
    return describe_dataset(input().string()).at("advice").dump();
  };
  EXPECT_NE(unknown(400, H5T_STD_I32LE).find("muster does not decode filter 400, nor does this HDF5"),
            std::string::npos);
  EXPECT_NE(unknown(400, H5T_STD_I32LE).find("as h5repack does"), std::string::npos);
}

}  // namespace
}  // namespace muster::convert_h5_test
