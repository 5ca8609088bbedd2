// Common to all conversions: options, order, parts, and no file after a failure.
#include "muster/convert.hpp"
#include "base/log.hpp"
#include "support/files.hpp"

#include <sys/mount.h>
#include <sys/resource.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <map>
#include <set>
#include <stdexcept>

namespace muster::convert_test {
namespace {

using test::idx, test::message, test::values;
using Bytes = std::vector<std::uint8_t>;
using Ints = std::vector<std::int32_t>;

/// x: 0, 1, 2 … as int32 (shape [N, 2], the number and its square); y: its remainder by 5.
class Convert : public test::FolderTest {
 protected:
  void make(std::uint32_t count) {
    Ints numbers;
    Bytes remainders;
    for (std::uint32_t i = 0; i < count; ++i) {
      numbers.insert(numbers.end(), {static_cast<int>(i), static_cast<int>(i * i)});
      remainders.push_back(static_cast<std::uint8_t>(i % 5));
    }
    inputs = {write("x", idx(0x0C, {count, 2}, numbers)), write("y", idx(0x08, {count}, remainders))};
  }
  void run(const ConvertOptions& options) { convert_idx(inputs, output(), options); }
  std::filesystem::path output(const std::string& part = "") const {
    return folder / (part.empty() ? "out.h5" : "out." + part + ".h5");
  }
  /// The numbers in a file, in order, after a check that columns still belong together.
  static Ints numbers(const std::filesystem::path& path) {
    const auto x = values<std::int32_t>(path, "x");
    const auto y = values<std::uint8_t>(path, "y");
    Ints found;
    for (std::size_t i = 0; i < y.size(); ++i) {
      const auto value = static_cast<std::uint32_t>(x[2 * i]);
      EXPECT_EQ(static_cast<std::uint32_t>(x[2 * i + 1]), value * value);  // which may not fit
      EXPECT_EQ(y[i], x[2 * i] % 5);
      found.push_back(x[2 * i]);
    }
    return found;
  }
  static Ints up_to(int count) {
    Ints all(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) all[static_cast<std::size_t>(i)] = i;
    return all;
  }
  std::string usage(const ConvertOptions& options) {
    const auto text = message(ExitCode::usage, [&] { run(options); });
    EXPECT_EQ(names(), (std::vector<std::string>{"x", "y"})) << text;
    return text;
  }

  std::vector<std::filesystem::path> inputs;
};

TEST_F(Convert, WritesEveryLayout) {
  make(1000);
  for (const ConvertOptions& options : {ConvertOptions{}, ConvertOptions{.chunk = 7}, ConvertOptions{.chunk = 5000},
                                        ConvertOptions{.compress = 9}, ConvertOptions{.chunk = 64, .compress = 1}}) {
    run(options);
    EXPECT_EQ(numbers(output()), up_to(1000));
    const auto column = describe_dataset(output().string()).at("columns").at(0);
    EXPECT_EQ(column.at("layout"), options.chunk || options.compress ? "chunked" : "contiguous");
    if (options.chunk) {
      EXPECT_EQ(column.at("chunk").at(0), std::min<std::int64_t>(*options.chunk, 1000));
    }
    EXPECT_EQ(column.at("compression"),
              options.compress ? "shuffle, deflate " + std::to_string(*options.compress) : "none");
  }
}

TEST_F(Convert, WritesMoreThanOneBlock) {
  make(2'500'000);  // 20 MB
  run({.chunk = 300'000});
  EXPECT_EQ(numbers(output()), up_to(2'500'000));
}

TEST_F(Convert, SameInputMakesTheSameFile) {
  make(100);
  const auto content = [&] {
    run({.compress = 9, .shuffle = 4});
    std::ifstream file(output(), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const auto first = content();
  EXPECT_EQ(first, content());
}

TEST_F(Convert, SplitsInOrderAndCompletely) {
  make(10);
  run({.split = {{"train", 0.75}, {"val", 0.15}, {"test", 0.1}}});
  EXPECT_EQ(names(), (std::vector<std::string>{"out.test.h5", "out.train.h5", "out.val.h5", "x", "y"}));
  EXPECT_EQ(numbers(output("train")), (Ints{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(numbers(output("val")), Ints{8});
  EXPECT_EQ(numbers(output("test")), Ints{9});
}

TEST_F(Convert, ThirdsLeaveNothingOut) {
  make(100);
  run({.split = {{"a", 1. / 3}, {"b", 1. / 3}, {"c", 1. / 3}}});
  EXPECT_EQ(numbers(output("a")).size() + numbers(output("b")).size() + numbers(output("c")).size(), 100U);
}

TEST_F(Convert, SharesBelowOneLeaveTheRestOut) {
  make(100);
  run({.split = {{"a", 0.2}, {"b", 0.3}}});
  EXPECT_EQ(numbers(output("a")).size(), 20U);
  EXPECT_EQ(numbers(output("b")).size(), 30U);
  testing::internal::CaptureStderr();
  run({.split = {{"a", 0.2}, {"b", 0.3}}});
  detail::log::flush();
  EXPECT_NE(testing::internal::GetCapturedStderr().find("50 of the 100 samples go to no file"), std::string::npos);
}

TEST_F(Convert, SharesAboveOneAreRefused) {
  make(10);
  try {
    run({.split = {{"a", 0.6}, {"b", 0.5}}});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("the shares sum to more than 1"), std::string::npos) << error.what();
  }
  EXPECT_EQ(names(), (std::vector<std::string>{"x", "y"})) << "nothing is written";
}

TEST_F(Convert, ShufflesTheSameForTheSameSeed) {
  make(500);
  const auto order = [&](std::uint64_t seed) {
    run({.shuffle = seed});
    return numbers(output());
  };
  const auto first = order(1);
  EXPECT_EQ(first, order(1));
  EXPECT_NE(first, order(2));
  auto sorted = first;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, up_to(500));
  // Fixed numbers, so that a difference with another compiler or library is noticed.
  make(6);
  EXPECT_EQ(order(42), (Ints{3, 1, 5, 2, 4, 0}));
}

TEST_F(Convert, ShufflesBeforeItSplits) {
  make(50);
  run({.split = {{"a", 0.5}, {"b", 0.5}}, .shuffle = 9});
  const auto a = numbers(output("a")), b = numbers(output("b"));
  std::set<std::int32_t> all(a.begin(), a.end());
  all.insert(b.begin(), b.end());
  EXPECT_EQ(all.size(), 50U);
  EXPECT_FALSE(std::is_sorted(a.begin(), a.end()));
}

TEST_F(Convert, KeepsSoManyOfEachClass) {
  make(53);
  run({.per_class = 2});
  EXPECT_EQ(numbers(output()), up_to(10)) << "the first of each class, in their order";
  run({.shuffle = 5, .per_class = 4});
  std::map<int, int> counts;
  for (const auto number : numbers(output())) ++counts[number % 5];
  EXPECT_EQ(counts, (std::map<int, int>{{0, 4}, {1, 4}, {2, 4}, {3, 4}, {4, 4}}));
  run({.per_class = 1000});
  EXPECT_EQ(numbers(output()), up_to(53)) << "classes that have fewer are kept whole";
}

TEST_F(Convert, CountsOnlyClasses) {
  make(10);
  const auto refused = [&](const std::string& last, const ConvertOptions& options) {
    return message(ExitCode::usage, [&] { convert_idx({inputs[0], write("last", last)}, output(), options); });
  };
  const ConvertOptions options{.per_class = 1};
  EXPECT_NE(refused(idx(0x0D, {10}, std::vector<float>(10)), options).find("fractions"), std::string::npos);
  EXPECT_NE(refused(idx(0x08, {10, 2}, Bytes(20)), options).find("several numbers per sample"), std::string::npos);
  convert_idx({inputs[0], write("last", idx(0x08, {10, 1}, Bytes(10)))}, output(), options);
  EXPECT_EQ(describe_dataset(output().string()).at("samples"), 1);
}

TEST_F(Convert, RefusesOptionsThatDoNotFit) {
  make(10);
  EXPECT_NE(usage({.columns = {"x"}}).find("makes 2 columns and there are 1 name."), std::string::npos);
  EXPECT_NE(usage({.columns = {"x", "y", "z"}}).find("3 names"), std::string::npos);
  EXPECT_NE(usage({.columns = {"x", "x"}}).find("twice"), std::string::npos);
  EXPECT_NE(usage({.columns = {"x", ""}}).find("cannot be a name"), std::string::npos);
  EXPECT_NE(usage({.columns = {"a/b", "y"}}).find("cannot be a name"), std::string::npos);
  EXPECT_NE(usage({.chunk = 0}).find("at least one sample"), std::string::npos);
  EXPECT_NE(usage({.compress = 10}).find("from 1 (fast) to 9"), std::string::npos);
  EXPECT_NE(usage({.per_class = 0}).find("at least one"), std::string::npos);
  EXPECT_NE(usage({.split = {{"a", 0.6}, {"b", 0.6}}}).find("more than 1"), std::string::npos);
  EXPECT_NE(usage({.split = {{"a", 0}}}).find("not above 0"), std::string::npos);
  EXPECT_NE(usage({.split = {{"a", 0.5}, {"a", 0.5}}}).find("twice"), std::string::npos);
  EXPECT_NE(usage({.split = {{"../a", 0.5}}}).find("cannot be a name"), std::string::npos);
  EXPECT_NE(usage({.split = {{"a", 0.99}, {"b", 0.01}}}).find("none of the 10 samples"), std::string::npos);
  EXPECT_NE(message(ExitCode::usage, [&] { convert_idx({}, output()); }).find("there is no input"), std::string::npos);
  // 8 GiB of samples that take no space on the disk.
  const auto large = write("large", idx(0x08, {1 << 20, 1 << 13}, Bytes{}));
  std::filesystem::resize_file(large, std::filesystem::file_size(large) + (std::uintmax_t{1} << 33));
  const auto one_chunk = [&] { convert_idx({large}, output(), {.columns = {"x"}, .chunk = 1 << 20}); };
  EXPECT_NE(message(ExitCode::usage, one_chunk).find("samples is larger than 4 GB"), std::string::npos);
}

TEST_F(Convert, RefusesOutputsThatCannotBe) {
  make(10);
  const auto refused = [&](const std::filesystem::path& path) {
    return message(ExitCode::usage, [&] { convert_idx({inputs[0]}, path, {.columns = {"x"}}); });
  };
  // A forgotten output would overwrite the inputs.
  EXPECT_NE(refused(inputs[1]).find("must end in .h5"), std::string::npos);
  EXPECT_NE(refused(folder / "none" / "out.h5").find("there is no folder"), std::string::npos);
  std::filesystem::create_symlink(inputs[1], folder / "link.h5");
  EXPECT_NE(refused(folder / "link.h5").find("a symbolic link has this name"), std::string::npos);
  std::filesystem::rename(inputs[0], folder / "x.h5");
  inputs[0] = folder / "x.h5";
  EXPECT_NE(refused(inputs[0]).find("one of the inputs"), std::string::npos);
  EXPECT_NE(message(ExitCode::data, [&] { convert_idx({folder / "none"}, inputs[1], {.columns = {"x"}}); })
                .find("none: No such file"),
            std::string::npos)
      << "said before what is wrong with the output";
  std::filesystem::create_directory(output());
  EXPECT_NE(refused(output()).find("a folder has this name"), std::string::npos);
}

TEST_F(Convert, RefusesInputsOfDifferentLength) {
  make(10);
  write("y", idx(0x08, {9}, Bytes(9)));
  const auto text = message(ExitCode::data, [&] { run({}); });
  EXPECT_NE(text.find("x has 10 samples"), std::string::npos);
  EXPECT_NE(text.find("y has 9. Give files that belong together; of h5 and npz, choose"), std::string::npos);
}

TEST_F(Convert, ReplacesOnlyWhenAllIsWritten) {
  make(10);
  run({});
  make(2000);
  const auto stop = [](std::uint64_t, std::uint64_t) { throw std::runtime_error("stop"); };
  EXPECT_THROW(run({.progress = stop}), std::runtime_error);
  EXPECT_EQ(numbers(output()), up_to(10));
  EXPECT_EQ(names(), (std::vector<std::string>{"out.h5", "x", "y"}));
  run({});
  EXPECT_EQ(numbers(output()), up_to(2000));
}

TEST_F(Convert, TellsHowFarItIs) {
  make(1000);
  std::uint64_t last = 0, total = 0;
  run({.progress = [&](std::uint64_t done, std::uint64_t all) {
    if (all == 0) return;  // it reads
    EXPECT_GT(done, last);
    last = done;
    total = all;
  }});
  EXPECT_EQ(last, total);
  EXPECT_EQ(total, 9000U);
}

/// The layouts, each of which meets a full disk in its own way.
const std::vector<ConvertOptions> layouts{
    {}, {.chunk = 500}, {.compress = 1, .shuffle = 1}, {.split = {{"a", 0.3}, {"b", 0.7}}}};

TEST_F(Convert, FailsWhereverAWriteFails) {
  make(3000);
  // In a separate process, in which HDF5 cleans up under the limit when it ends.
  const auto sweep = [&] {
    ::signal(SIGXFSZ, SIG_IGN);
    rlimit unlimited{};
    ::getrlimit(RLIMIT_FSIZE, &unlimited);
    for (rlim_t bytes = 1; bytes < 10'000; bytes += 509)
      for (const auto& options : layouts) {
        const rlimit limit{bytes, unlimited.rlim_max};
        ::setrlimit(RLIMIT_FSIZE, &limit);
        EXPECT_NE(message(ExitCode::retry, [&] { run(options); }).find("File too large"), std::string::npos);
        EXPECT_EQ(names(), (std::vector<std::string>{"x", "y"})) << bytes;
        ::setrlimit(RLIMIT_FSIZE, &unlimited);
      }
    const rlimit limit{1, unlimited.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    std::exit(testing::Test::HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(sweep(), testing::ExitedWithCode(0), "");
}

TEST_F(Convert, FailsOnAFullDisk) {
  make(3000);
  const auto disk = folder / "disk";
  std::filesystem::create_directory(disk);
  int failed = 0, written = 0;
  for (int pages = 1; pages <= 16; ++pages)
    for (const auto& options : layouts) {
      if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, ("size=" + std::to_string(pages * 4) + "k").c_str()) != 0)
        GTEST_SKIP() << "no file system can be mounted here: " << std::strerror(errno);
      try {
        for (const auto& path : convert_idx(inputs, disk / "out.h5", options)) EXPECT_GT(numbers(path).size(), 0U);
        ++written;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::retry);
        EXPECT_NE(std::string(error.what()).find(": No space left on device. "), std::string::npos) << error.what();
        EXPECT_TRUE(std::filesystem::is_empty(disk)) << pages;
        ++failed;
      }
      EXPECT_EQ(::umount(disk.c_str()), 0) << "a file is still open";
    }
  EXPECT_GT(failed, 10);
  EXPECT_GT(written, 10);
}

TEST_F(Convert, DescribesAndAdvises) {
  make(100);
  run({});
  auto dataset = describe_dataset(output().string());
  EXPECT_EQ(dataset.at("samples"), 100);
  EXPECT_EQ(dataset.at("bytes"), std::filesystem::file_size(output()));
  auto column = dataset.at("columns").at(0);
  Ints first(4);  // 0, 0² and 1, 1²
  std::ifstream file(output(), std::ios::binary);
  file.seekg(column.at("offset").get<std::int64_t>());
  file.read(reinterpret_cast<char*>(first.data()), 16);
  EXPECT_EQ(first, (Ints{0, 0, 1, 1}));
  column.erase("offset");
  EXPECT_EQ(column, (Json{{"name", "x"},
                          {"dtype", "int32"},
                          {"shape", {100, 2}},
                          {"layout", "contiguous"},
                          {"chunk", nullptr},
                          {"compression", "none"},
                          {"bytes", 800},
                          {"reader", "direct"}}));
  EXPECT_TRUE(dataset.at("advice").empty());
  run({.compress = 1});
  dataset = describe_dataset(output().string());
  EXPECT_EQ(dataset.at("columns").at(0).at("reader"), "decoded");
  EXPECT_TRUE(dataset.at("columns").at(0).at("offset").is_null());
  EXPECT_NE(dataset.at("advice").at(0).get<std::string>().find("x, y: the first pass decodes"), std::string::npos);
}

TEST_F(Convert, DescribesWhatIsNoDataset) {
  make(10);
  EXPECT_NE(message(ExitCode::data, [&] { describe_dataset((folder / "none.h5").string()); }).find("No such file"),
            std::string::npos);
  EXPECT_NE(message(ExitCode::data, [&] { describe_dataset(inputs[0].string()); }).find("not an HDF5 file"),
            std::string::npos);
  run({});
  EXPECT_NE(message(ExitCode::data, [&] { describe_dataset(output().string() + ":/g"); }).find("no group \"/g\""),
            std::string::npos);
}

TEST_F(Convert, AdvisesOnForeignFiles) {
  const auto path = folder / "foreign.h5";
  {
    const detail::hdf5::Lock lock;
    auto file = detail::hdf5::create_file(path);
    const auto add = [&](const char* name, hid_t type, std::vector<hsize_t> shape) {
      const detail::hdf5::Handle space(
          detail::hdf5::check(H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr), name), H5Sclose);
      const detail::hdf5::Handle set(
          detail::hdf5::check(H5Dcreate2(file.get(), name, type, space.get(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                              name),
          H5Dclose);
    };
    add("a", H5T_IEEE_F64BE, {4, 2});
    add("b", H5T_NATIVE_FLOAT, {5});
    add("s", H5T_C_S1, {4});
    detail::hdf5::check(H5Lcreate_soft("/nowhere", file.get(), "dangling", H5P_DEFAULT, H5P_DEFAULT), "linking");
    const detail::hdf5::Handle inner(
        detail::hdf5::check(H5Gcreate2(file.get(), "inner", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), "making a group"),
        H5Gclose);
    file.close("closing");
  }
  const auto dataset = describe_dataset(path.string());
  const auto advice = dataset.at("advice").dump();
  EXPECT_EQ(dataset.at("samples"), nullptr);
  EXPECT_EQ(dataset.at("columns").size(), 2U);
  EXPECT_EQ(dataset.at("groups"), Json::array({"inner"}));
  for (const char* part :
       {"a: nothing was ever written", "a: float64 is twice", "(a 4, b 5)", "s: it holds strings", "dangling"})
    EXPECT_NE(advice.find(part), std::string::npos) << part << " in " << advice;
}

}  // namespace
}  // namespace muster::convert_test
