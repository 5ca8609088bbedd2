// Datasets of samples of different length, and their passes in buckets.
#include "data/sources/source.hpp"
#include "muster/error.hpp"
#include "muster/preprocessor.hpp"
#include "support/hdf5_fixture.hpp"
#include "unit/pass_world.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

namespace muster::detail::data::ragged_test {
namespace {

using namespace pass_world;
using test::Folder, test::H5File, test::Layout;

template <class Use>
std::string refused(Use&& use, ExitCode code = ExitCode::data) {
  try {
    use();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

Samples offsets_of(const Samples& lengths) {
  Samples offsets{0};
  for (const auto length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

void write_numbers(H5File& file, const std::string& name, const Samples& values, const Layout& layout = {},
                   hid_t type = H5T_STD_I64LE) {
  auto how = layout;
  how.chunk = std::min<hsize_t>(how.chunk, values.size());
  file.dataset(name, {values.size()}, type, H5T_NATIVE_INT64, values.data(), how);
}

/// tokens [sum] = 0, 1, 2, …; frames [sum, 2] = 0, 1, 2, …; y [samples] = 0, 1, 2, …
std::string write(const Folder& folder, const Samples& lengths, const Layout& layout = {},
                  hid_t token_type = H5T_STD_I32LE) {
  const auto path = folder.file("ragged.h5");
  H5File file(path);
  const auto offsets = offsets_of(lengths);
  const auto sum = static_cast<hsize_t>(offsets.back());
  write_numbers(file, "tokens", indices(offsets.back()), layout, token_type);
  auto how = layout;
  how.chunk = std::min(how.chunk, sum);
  file.dataset("frames", {sum, 2}, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, test::counting<float>(2 * sum).data(), how);
  write_numbers(file, "offsets", offsets, layout);
  write_numbers(file, "y", indices(std::ssize(lengths)), layout);
  return path;
}

/// The batch by its definition, value by value.
void expect_batch(const Batch& batch, const Samples& samples, const Samples& lengths, std::int64_t most,
                  double padding) {
  const auto offsets = offsets_of(lengths);
  const auto length_of = [&](std::int64_t sample) { return std::min(most, lengths[static_cast<std::size_t>(sample)]); };
  std::int64_t longest = 0;
  for (const auto sample : samples) longest = std::max(longest, length_of(sample));
  const auto rows = std::ssize(samples);
  auto tokens = at::full({rows, longest}, padding, at::kDouble),
       frames = at::full({rows, longest, 2}, padding, at::kDouble), mask = at::full({rows, longest}, false, at::kBool);
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto sample = samples[static_cast<std::size_t>(r)];
    for (std::int64_t i = 0; i < length_of(sample); ++i) {
      const auto value = offsets[static_cast<std::size_t>(sample)] + i;
      tokens[r][i] = static_cast<double>(value);
      frames[r][i][0] = static_cast<double>(2 * value);
      frames[r][i][1] = static_cast<double>(2 * value + 1);
      mask[r][i] = true;
    }
  }
  EXPECT_TRUE(at::equal(batch["tokens"].to(at::kDouble), tokens)) << batch["tokens"] << tokens;
  EXPECT_TRUE(at::equal(batch["frames"].to(at::kDouble), frames));
  EXPECT_TRUE(at::equal(batch["tokens_mask"], mask));
  EXPECT_TRUE(at::equal(batch["y"], at::tensor(samples, at::kLong)));
}

const RaggedOptions both{.values = {"tokens", "frames"}, .columns = {"y"}};

TEST(Ragged, ReadsWhatItsDefinitionSays) {
  std::mt19937_64 random(17);
  const std::vector<std::pair<Layout, hid_t>> layouts{{{}, H5T_STD_I32LE},
                                                      {{.chunk = 7}, H5T_STD_I64BE},
                                                      {{.chunk = 7, .deflate = 1}, H5T_STD_U16LE},
                                                      {{.compact = true}, H5T_STD_I32LE},
                                                      {{.chunk = 7, .filter = H5Z_FILTER_NBIT}, H5T_STD_I32LE}};
  for (int round = 0; round < 60; ++round) {
    const Folder folder;
    Samples lengths(1 + random() % 30);
    for (auto& length : lengths) length = random() % 3 == 0 ? 0 : static_cast<std::int64_t>(random() % 20);
    if (round % 10 == 5)
      std::ranges::fill(lengths, 0);
    else
      lengths[random() % lengths.size()] = 5;  // HDF5 has no chunks of nothing
    const auto& [layout, type] = layouts[static_cast<std::size_t>(round) % layouts.size()];
    auto options = both;
    options.padding = round % 2 == 0 ? 0 : -7;
    if (round % 3 == 0) options.max_length = static_cast<std::int64_t>(1 + random() % 12);
    if (round % 4 == 0) options.cache_bytes = 0;
    const auto data = Dataset::ragged(write(folder, lengths, layout, type), options);
    ASSERT_EQ(data.count(), std::ssize(lengths));
    for (int batch = 0; batch < 4; ++batch) {
      Samples samples(1 + random() % 20);  // some of them several times
      for (auto& sample : samples) sample = static_cast<std::int64_t>(random() % lengths.size());
      expect_batch(data.read(samples), samples, lengths, options.max_length.value_or(1000), options.padding.toDouble());
    }
  }
}

TEST(Ragged, MayHaveEmptySamplesOnly) {
  const Folder folder;
  const auto data = Dataset::ragged(write(folder, {3, 0, 0, 2}), both);
  const auto empty = data.read(Samples{1, 2, 1});
  EXPECT_EQ(empty["tokens"].sizes(), (at::IntArrayRef{3, 0}));
  EXPECT_EQ(empty["frames"].sizes(), (at::IntArrayRef{3, 0, 2}));
  EXPECT_EQ(empty["tokens_mask"].sizes(), (at::IntArrayRef{3, 0}));
  EXPECT_EQ(in_order(World(data, 2), {.global_batch_size = 3}), indices(4));
  const Folder other;
  const auto all_empty = Dataset::ragged(write(other, {0, 0, 0}), both);
  for (int batch = 0; batch < 3; ++batch) expect_batch(all_empty.read(Samples{1, 2}), {1, 2}, {0, 0, 0}, 9, 0);
}

TEST(Ragged, ShowsALengthOfMinusOne) {
  const Folder folder;
  const auto path = write(folder, {3, 0, 2});
  const auto data = Dataset::ragged(path, both);
  EXPECT_EQ(data.schema(), (Schema{{"tokens", at::kInt, {-1}},
                                   {"frames", at::kFloat, {-1, 2}},
                                   {"tokens_mask", at::kBool, {-1}},
                                   {"y", at::kLong, {}}}));
  EXPECT_TRUE(at::equal(data.column("y"), at::arange(3)));
  EXPECT_NE(refused([&] { data.column("tokens"); }, ExitCode::usage)
                .find("the samples of \"tokens\" are of different length"),
            std::string::npos);
  EXPECT_EQ(source_of(data)->fingerprint().count, 3);
  EXPECT_FALSE(
      difference(source_of(data)->fingerprint(), "a", source_of(Dataset::ragged(path, both))->fingerprint(), "b"));
}

/// Adds a column, and makes one of the lengths.
struct Lengthen : Preprocessor {
  void fit(const Dataset&, const Communicator&) override {}
  bool fitted() const override { return true; }
  void transform(Batch& batch) const override {
    batch.set("lengths", batch["tokens_mask"].sum(1));
    batch.set("tokens", batch["tokens"] * 2);
  }
  Json state() const override { return {}; }
  void load_state(const Json&) override {}
};

TEST(Ragged, ComposesWithPreprocessorsAndSubsets) {
  const Folder folder;
  const auto data = Dataset::ragged(write(folder, {3, 0, 2, 5}), both).transform(std::make_shared<Lengthen>());
  EXPECT_EQ(data.schema(), (Schema{{"tokens", at::kInt, {-1}},
                                   {"frames", at::kFloat, {-1, 2}},
                                   {"tokens_mask", at::kBool, {-1}},
                                   {"y", at::kLong, {}},
                                   {"lengths", at::kLong, {}}}));
  const auto subset = data.subset({3, 1, 3});
  EXPECT_EQ(source_of(subset)->lengths()->of_samples, (Samples{5, 0, 5}));
  const auto batch = subset.read(Samples{1, 2});
  EXPECT_TRUE(at::equal(batch["lengths"], at::tensor({0, 5}, at::kLong)));
  EXPECT_TRUE(at::equal(batch["tokens"], at::tensor({0, 0, 0, 0, 0, 10, 12, 14, 16, 18}, at::kInt).view({2, 5})));
}

TEST(Ragged, BucketsAreOneOrderAtAnyWorldAndAfterAResume) {
  std::mt19937_64 random(23);
  for (int round = 0; round < 12; ++round) {
    const Folder folder;
    Samples lengths(100 + random() % 500);
    for (auto& length : lengths) length = static_cast<std::int64_t>(random() % 40);
    const auto bucket = static_cast<std::int64_t>(1 + random() % 9);
    const auto data = Dataset::ragged(write(folder, lengths), both);
    BatchOptions options{.global_batch_size = bucket, .shuffle = true, .bucket_samples = bucket};
    const auto alone = in_order(World(data, 1, true, 4), options);
    EXPECT_EQ(sorted(alone), indices(std::ssize(lengths)));
    for (const int ranks : {2, 3}) EXPECT_EQ(in_order(World(data, ranks, true, 4), options), alone);
    EXPECT_NE(in_order(World(data, 1, true, 5), options), alone);
    Json position;
    auto seen = in_order(World(data, 2, true, 4), options, 1 + static_cast<std::int64_t>(random() % 10), &position);
    // Samples that are cut have the same order.
    auto cut = both;
    cut.max_length = 4;
    const World later(Dataset::ragged(folder.file("ragged.h5"), cut), 3, true, 99);
    for (const auto& state : later.states) state->restore(Json::parse(position.dump()));
    options.global_batch_size = 7;
    if (round % 2 == 0) options.bucket_samples = {};  // from the next pass on
    const auto rest = in_order(later, options);
    seen.insert(seen.end(), rest.begin(), rest.end());
    EXPECT_EQ(seen, alone);
    EXPECT_EQ(sorted(in_order(later, options)), indices(std::ssize(lengths)));
  }
}

std::int64_t values_of_all_batches(const Dataset& data, const BatchOptions& options) {
  std::int64_t values = 0;
  for (const auto& batch : World(data, 1).shard().iter_batches(options)) values += batch["tokens"].numel();
  return values;
}

TEST(Ragged, BucketsNeedLessPadding) {
  const Folder folder;
  std::mt19937_64 random(29);
  Samples lengths(2000);
  for (auto& length : lengths) length = static_cast<std::int64_t>(random() % 100);
  const auto data = Dataset::ragged(write(folder, lengths), {.values = {"tokens"}, .columns = {"y"}});
  const auto real = offsets_of(lengths).back();
  const auto plain = values_of_all_batches(data, {.batch_size = 16, .shuffle = true}) - real;
  const auto less = values_of_all_batches(data, {.batch_size = 16, .shuffle = true, .bucket_samples = 16}) - real;
  EXPECT_LT(less * 20, plain);
}

TEST(Ragged, WeightedDrawsRepeatSamples) {
  const Folder folder;
  const Samples lengths{2, 0, 7};
  const auto data = Dataset::ragged(write(folder, lengths), both);
  for (const auto& batch : World(data, 1).shard().iter_batches(
           {.batch_size = 8, .weights = at::tensor({1.0, 1.0, 2.0}), .num_samples = 40})) {
    Samples samples;
    append(samples, batch);
    expect_batch(batch, samples, lengths, 100, 0);
  }
}

TEST(Ragged, AnInterruptedPassInBucketsNeedsItsLengths) {
  const Folder folder;
  const BatchOptions options{.batch_size = 2, .shuffle = true, .bucket_samples = 2};
  Json position;
  in_order(World(Dataset::ragged(write(folder, {3, 1, 2, 4, 5}), both), 1), options, 1, &position);
  for (const auto& other : {Dataset::ragged(write(folder, {3, 1, 2, 5, 4}), both), numbers(5)}) {
    const World later(other, 1);
    later.states[0]->restore(position);
    EXPECT_NE(refused([&] {
                in_order(later, {.batch_size = 2});
              }).find("saved in the middle of a pass in buckets, and the samples had other lengths"),
              std::string::npos);
  }
  position["buckets"]["samples"] = 0;
  EXPECT_THROW(World(5, 1).states[0]->restore(position), Error);
}

TEST(Ragged, RefusesBucketsThatMakeNoSense) {
  const World plain(10, 1);
  const auto says = [&](const BatchOptions& options) {
    return refused([&] { plain.shard().iter_batches(options); }, ExitCode::usage);
  };
  EXPECT_NE(says({.shuffle = true, .bucket_samples = 4})
                .find("bucket_samples is given, and the dataset in memory has "
                      "samples of one length"),
            std::string::npos);
  EXPECT_NE(says({.bucket_samples = 4}).find("buckets are made of the order that shuffle alone gives"),
            std::string::npos);
  EXPECT_NE(says({.shuffle = true, .local_shuffle_buffer_size = 3, .bucket_samples = 4})
                .find("buckets are made of the order that shuffle alone gives"),
            std::string::npos);
  EXPECT_NE(says({.shuffle = true, .bucket_samples = 0}).find("bucket_samples is less than 1"), std::string::npos);
}

TEST(Ragged, RefusesHostileOffsets) {
  const Folder folder;
  const auto says = [&](const Samples& offsets) {
    H5File file(folder.file("bad.h5"));
    write_numbers(file, "tokens", indices(10));
    write_numbers(file, "offsets", offsets);
    write_numbers(file, "y", indices(3));
    return [&] { Dataset::ragged(folder.file("bad.h5"), {.values = {"tokens"}, .columns = {"y"}}).count(); };
  };
  const auto expect = [&](const Samples& offsets, const std::string& fact) {
    const auto open = says(offsets);
    EXPECT_NE(refused(open).find(fact), std::string::npos) << fact;
  };
  constexpr auto most = std::numeric_limits<std::int64_t>::max(), least = std::numeric_limits<std::int64_t>::min();
  expect({0, 4, 6, 11}, "the last one is 11, and there are 10 values");
  expect({0, 4, 6, 9}, "the last one is 9, and there are 10 values");
  expect({1, 4, 6, 10}, "the first one is 1, not 0");
  expect({0, 6, 4, 10}, "number 2 is 4, which is not between 6, the one before, and 10, the number of values");
  expect({0, 11, 10}, "number 1 is 11");
  expect({0, -1, 4, 10}, "number 1 is -1");
  expect({0, most, 4, 10}, "number 1 is 9223372036854775807");
  expect({0, least, 4, 10}, "number 1 is -9223372036854775808");
  expect({0, 4, 10}, "it has 3 rows, and the offsets are those of 2 samples");
  expect({10}, "there are fewer than two, and so no samples");
  says({0, 3, 6, 10})();
}

TEST(Ragged, RefusesOffsetsOfOtherShapesAndMoreThanFitIntoMemory) {
  const Folder folder;
  {
    H5File file(folder.file("bad.h5"));
    write_numbers(file, "tokens", {});
    file.dataset("floats", {3}, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, std::vector<double>{0, 1, 2}.data());
    file.dataset("pairs", {3, 2}, H5T_STD_I64LE, H5T_NATIVE_INT64, indices(6).data());
    file.dataset("huge", {hsize_t{1} << 50}, H5T_STD_I64LE, H5T_NATIVE_INT64, nullptr, {.chunk = 1 << 16});
  }
  const auto says = [&](const std::string& offsets) {
    return refused([&] { Dataset::ragged(folder.file("bad.h5"), {.values = {"tokens"}, .offsets = offsets}).count(); });
  };
  EXPECT_NE(says("floats").find("they are not one whole number for each sample"), std::string::npos);
  EXPECT_NE(says("pairs").find("they are not one whole number for each sample"), std::string::npos);
  EXPECT_NE(says("huge").find("there are 1125899906842624, more than fit into memory"), std::string::npos);
}

TEST(Ragged, RefusesColumnsThatDoNotGoTogether) {
  const Folder folder;
  const auto path = write(folder, {3, 0, 2});
  const auto says = [&](const RaggedOptions& options, ExitCode code) {
    return refused([&] { Dataset::ragged(path, options).count(); }, code);
  };
  const auto expect = [&](const RaggedOptions& options, const std::string& fact, ExitCode code = ExitCode::usage) {
    EXPECT_NE(says(options, code).find(fact), std::string::npos) << fact;
  };
  expect({}, "no column of values is named");
  expect({.values = {"tokens"}, .max_length = 0}, "max_length is less than 1");
  expect({.values = {"tokens", "frames", "tokens"}}, "there are two columns \"tokens\"");
  expect({.values = {"tokens"}, .columns = {"tokens_mask"}}, "there are two columns \"tokens_mask\"");
  expect({.values = {"frames"}, .padding = 1e300}, "its type, Float, cannot hold RaggedOptions::padding");
  EXPECT_EQ(Dataset::ragged(path, {.values = {"frames"}, .padding = -std::numeric_limits<double>::infinity()}).count(),
            3);
  expect({.values = {"tokens"}, .padding = 0.5}, "its type, Int, cannot hold RaggedOptions::padding");
  expect({.values = {"tokens"}, .padding = std::int64_t{1} << 40}, "its type, Int, cannot hold RaggedOptions::padding");
  expect({.values = {"tokens", "y"}}, "it has 3 values, and \"tokens\" has 5", ExitCode::data);
  expect({.values = {"tokens"}, .columns = {"frames"}}, "it has 5 rows, and the offsets are those of 3 samples",
         ExitCode::data);
  EXPECT_EQ(Dataset::ragged(path, {.values = {"frames"}, .padding = 0.5}).count(), 3);
}

}  // namespace
}  // namespace muster::detail::data::ragged_test
