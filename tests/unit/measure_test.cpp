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

TEST_F(Measure, RefusesWhatCannotBeMeasured) {
  const auto refused = [](const std::string& path) { return message(ExitCode::data, [&] { measure_dataset(path); }); };
  EXPECT_NE(refused((folder / "none.h5").string()).find("No such file"), std::string::npos);
  const auto path = make({.chunk = 100, .deflate = 1});
  for (const std::string nowhere : {"/proc", "/none"}) {
    ::setenv("TMPDIR", nowhere.c_str(), 1);
    const auto text = message(ExitCode::retry, [&] { measure_dataset(path); });
    EXPECT_NE(text.find("making a folder in " + nowhere), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace muster::measure_test
