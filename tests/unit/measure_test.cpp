// What is measured of a dataset, and that nothing of the conversion stays. The figures themselves are not checked.
#include "muster/convert.hpp"
#include "support/files.hpp"
#include "support/hdf5_fixture.hpp"

#include <cstdlib>
#include <stdexcept>

namespace muster::measure_test {
namespace {

using test::H5File, test::Layout, test::message;
using Names = std::vector<std::string>;

constexpr int rows = 3000, width = 5;

class Measure : public test::FolderTest {
 protected:
  Measure() { ::setenv("TMPDIR", temporary().c_str(), 1); }
  ~Measure() override { ::unsetenv("TMPDIR"); }
  std::filesystem::path temporary() const {
    std::filesystem::create_directory(folder / "temporary");
    return folder / "temporary";
  }
  std::string make(const Layout& layout) const {
    const auto path = (folder / "in.h5").string();
    H5File(path).dataset("x", {rows, width}, H5T_STD_I32LE, H5T_NATIVE_INT32,
                         test::counting<std::int32_t>(rows * width).data(), layout);
    return path;
  }
  bool left_nothing() const { return std::filesystem::is_empty(temporary()); }
  static void expect_speed(const Json& pass) {
    const double samples = pass.at("samples_per_s"), bytes = pass.at("bytes_per_s");
    EXPECT_GT(samples, 0);
    EXPECT_NEAR(bytes / samples, width * sizeof(std::int32_t), 1e-6);
  }
};

TEST_F(Measure, ReadsWhereRowsLieWithoutAConversion) {
  const auto measured = measure_dataset(make({}));
  EXPECT_EQ(measured.at("samples"), rows);
  EXPECT_EQ(measured.at("batch"), 256);
  EXPECT_EQ(measured.at("cache"), "memory");
  expect_speed(measured.at("now").at("first_pass"));
  EXPECT_TRUE(measured.at("now").at("later_passes").is_null());
  EXPECT_TRUE(measured.at("converted").is_null());
  EXPECT_TRUE(left_nothing());
}

TEST_F(Measure, ConvertsAsAdvised) {
  const auto path = make({.chunk = 100, .deflate = 1});
  ASSERT_FALSE(describe_dataset(path).at("convert").is_null());
  int calls = 0;
  const auto measured = measure_dataset(path, [&] { ++calls; });
  expect_speed(measured.at("now").at("first_pass"));
  expect_speed(measured.at("now").at("later_passes"));
  expect_speed(measured.at("converted").at("first_pass"));
  EXPECT_TRUE(measured.at("converted").at("later_passes").is_null());  // contiguous: rows are read where they lie
  EXPECT_GT(calls, 0);
  EXPECT_TRUE(left_nothing());
  EXPECT_EQ(names(), (Names{"in.h5", "temporary"}));
}

TEST_F(Measure, EndsWhereItIsToldToAndLeavesNothing) {
  const auto path = make({.chunk = 100, .deflate = 1});
  bool seen = false;
  const auto stop_at_conversion = [&] {
    seen = !left_nothing();
    if (seen) throw std::runtime_error("stop");
  };
  EXPECT_THROW(measure_dataset(path, stop_at_conversion), std::runtime_error);
  EXPECT_TRUE(seen);
  EXPECT_TRUE(left_nothing());
  EXPECT_THROW(measure_dataset(path, [] { throw std::runtime_error("stop"); }), std::runtime_error);
}

/// Three samples of 2, 0 and 4 values, with frames [values, 2], and a label for each sample.
void write_ragged(const std::string& path, const std::string& offsets, const std::vector<std::int64_t>& numbers) {
  H5File file(path);
  const auto sum = static_cast<hsize_t>(6);
  file.dataset("tokens", {sum}, H5T_STD_I32LE, H5T_NATIVE_INT32, test::counting<std::int32_t>(sum).data());
  file.dataset("frames", {sum, 2}, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, test::counting<float>(2 * sum).data());
  file.dataset(offsets, {numbers.size()}, H5T_STD_I64LE, H5T_NATIVE_INT64, numbers.data());
  file.dataset("label", {3}, H5T_STD_I64LE, H5T_NATIVE_INT64, test::counting<std::int64_t>(3).data());
}

TEST_F(Measure, RecognisesSamplesOfDifferentLength) {
  const auto path = (folder / "ragged.h5").string();
  const auto advice = [&] { return describe_dataset(path).at("advice").dump(-1, ' '); };
  write_ragged(path, "offsets", {0, 2, 2, 6});
  EXPECT_EQ(describe_dataset(path).at("ragged"), (Json{{"values", Json::array({"frames", "tokens"})},
                                                       {"offsets", "offsets"},
                                                       {"columns", Json::array({"label"})},
                                                       {"samples", 3}}));
  EXPECT_TRUE(describe_dataset(path).at("samples").is_null());
  EXPECT_EQ(describe_dataset(path).at("advice"),
            Json::array({"it looks like 3 samples of different length, which Dataset::ragged(\"" + path +
                         "\", {.values = {\"frames\", \"tokens\"}, .columns = {\"label\"}}) reads"}));
  write_ragged(path, "begins", {0, 2, 2, 6});
  EXPECT_NE(advice().find(R"(\"tokens\"}, .offsets = \"begins\", .columns)"), std::string::npos) << advice();
  for (const std::vector<std::int64_t>& numbers :
       {std::vector<std::int64_t>{0, 4, 2, 6}, {1, 2, 2, 6}, {0, 2, 2, 5}, {0, 2, 2, 7}, {0, -1, 2, 6}}) {
    write_ragged(path, "offsets", numbers);
    EXPECT_TRUE(describe_dataset(path).at("ragged").is_null());
    EXPECT_NE(advice().find("choose columns of the same length"), std::string::npos) << advice();
  }
  EXPECT_TRUE(describe_dataset(make({})).at("ragged").is_null());
}

TEST_F(Measure, ReadsSamplesOfDifferentLength) {
  const auto path = (folder / "ragged.h5").string();
  write_ragged(path, "offsets", {0, 2, 2, 6});
  const auto measured = measure_dataset(path);
  EXPECT_EQ(measured.at("samples"), 3);
  EXPECT_TRUE(measured.at("converted").is_null());
  const auto& pass = measured.at("now").at("first_pass");
  // On average two values of 4 + 8 + 1 (their mask) bytes, and a label of 8.
  EXPECT_NEAR(pass.at("bytes_per_s").get<double>() / pass.at("samples_per_s").get<double>(), 34, 1e-6);
}

TEST_F(Measure, RefusesWhatCannotBeMeasured) {
  const auto refused = [](const std::string& path) { return message(ExitCode::data, [&] { measure_dataset(path); }); };
  EXPECT_NE(refused((folder / "none.h5").string()).find("No such file"), std::string::npos);
  const auto path = make({.chunk = 100, .deflate = 1});
  ::setenv("TMPDIR", "/proc", 1);
  EXPECT_NE(message(ExitCode::retry, [&] { measure_dataset(path); }).find("making a folder in /proc"),
            std::string::npos);
  ::setenv("TMPDIR", "/none", 1);
  EXPECT_NE(message(ExitCode::usage, [&] { measure_dataset(path); }).find("TMPDIR is /none, and that is no folder"),
            std::string::npos);
}

}  // namespace
}  // namespace muster::measure_test
