// Several files of samples of different length as one dataset.
#include "data/sources/source.hpp"
#include "muster/error.hpp"
#include "support/hdf5_fixture.hpp"
#include "unit/pass_world.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace muster::detail::data::ragged_files_test {
namespace {

using namespace pass_world;
using test::Folder, test::H5File, test::Layout;

std::int64_t token(std::int64_t sample, std::int64_t place) { return 100 * sample + place; }

void write_numbers(H5File& file, const std::string& name, const Samples& values, Layout layout = {},
                   hid_t type = H5T_STD_I64LE) {
  layout.chunk = std::min<hsize_t>(layout.chunk, values.size());
  file.dataset(name, {values.size()}, type, H5T_NATIVE_INT64, values.data(), layout);
}

/// Files of samples with these lengths. The tokens and y of a sample tell its number in all files.
class Texts {
 public:
  explicit Texts(std::vector<Samples> files, const std::vector<Layout>& layouts = {Layout{}}) {
    for (const auto& lengths : files) {
      Samples tokens, offsets{0}, y;
      for (const auto length : lengths) {
        y.push_back(std::ssize(all_lengths));
        for (std::int64_t place = 0; place < length; ++place) tokens.push_back(token(y.back(), place));
        offsets.push_back(std::ssize(tokens));
        all_lengths.push_back(length);
      }
      const auto& layout = layouts[paths.size() % layouts.size()];
      paths.push_back(folder.file("part" + std::to_string(paths.size()) + ".h5"));
      H5File file(paths.back());
      write_numbers(file, "tokens", tokens, layout);
      write_numbers(file, "offsets", offsets, layout);
      write_numbers(file, "y", y, layout);
    }
  }

  Dataset open(RaggedOptions options = {}) const {
    options.values = {"tokens"};
    options.columns = {"y"};
    return Dataset::ragged(paths, std::move(options));
  }

  void expect(const Batch& batch, const Samples& samples, std::int64_t most = 1000) const {
    std::int64_t longest = 0;
    const auto length_of = [&](std::int64_t s) { return std::min(most, all_lengths[static_cast<std::size_t>(s)]); };
    for (const auto sample : samples) longest = std::max(longest, length_of(sample));
    auto tokens = at::full({std::ssize(samples), longest}, 0, at::kLong);
    auto mask = at::full({std::ssize(samples), longest}, false, at::kBool);
    for (std::int64_t row = 0; row < std::ssize(samples); ++row) {
      const auto sample = samples[static_cast<std::size_t>(row)];
      for (std::int64_t place = 0; place < length_of(sample); ++place) {
        tokens[row][place] = token(sample, place);
        mask[row][place] = true;
      }
    }
    EXPECT_TRUE(at::equal(batch["tokens"], tokens)) << batch["tokens"] << tokens;
    EXPECT_TRUE(at::equal(batch["tokens_mask"], mask));
    EXPECT_TRUE(at::equal(batch["y"], at::tensor(samples, at::kLong)));
  }

  Folder folder;
  std::vector<std::string> paths;
  Samples all_lengths;
};

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

TEST(RaggedFiles, ReadsSamplesAcrossTheSeams) {
  const Texts texts({{3, 0}, {2, 5, 1}, {4}});
  const auto data = texts.open();
  EXPECT_EQ(data.count(), 6);
  texts.expect(data.read(indices(6)), indices(6));
  for (const auto& samples : std::vector<Samples>{{1, 2}, {5, 4, 2, 1}, {2, 1, 2, 1, 5, 5}, {0}, {1}, {5}})
    texts.expect(data.read(samples), samples);
  EXPECT_EQ(data.read(Samples{1})["tokens"].sizes(), (at::IntArrayRef{1, 0}));
  EXPECT_TRUE(at::equal(data.column("y"), at::tensor(indices(6), at::kLong)));
  EXPECT_EQ(data.schema(), Texts(std::vector<Samples>{{1}}).open().schema());
  EXPECT_EQ(source_of(data)->lengths()->of_samples, texts.all_lengths);
}

TEST(RaggedFiles, ReadsFilesOfDifferentLayouts) {
  const std::vector<Layout> layouts{
      {}, {.chunk = 7}, {.chunk = 5, .deflate = 1}, {.chunk = 6, .filter = H5Z_FILTER_NBIT}};
  std::mt19937_64 random(31);
  for (int round = 0; round < 24; ++round) {
    std::vector<Samples> files(1 + random() % 6);
    for (auto& lengths : files) {
      lengths.resize(1 + random() % 9);
      for (auto& length : lengths) length = random() % 4 == 0 ? 0 : static_cast<std::int64_t>(random() % 12);
      lengths[random() % lengths.size()] = 3;
    }
    const Texts texts(files, layouts);
    RaggedOptions options;
    if (round % 2 == 0) options.max_length = static_cast<std::int64_t>(1 + random() % 9);
    if (round % 3 == 0) options.cache_bytes = static_cast<std::int64_t>(random() % 200);
    const auto data = texts.open(options);
    for (int batch = 0; batch < 4; ++batch) {
      Samples samples(1 + random() % 20);
      for (auto& sample : samples) sample = static_cast<std::int64_t>(random() % texts.all_lengths.size());
      texts.expect(data.read(samples), samples, options.max_length.value_or(1000));
    }
  }
}

TEST(RaggedFiles, MayHaveNoValuesInAFile) {
  const Texts texts({{0, 0}, {2, 1}, {0}});
  texts.expect(texts.open().read(indices(5)), indices(5));
  texts.expect(texts.open().read(Samples{4, 0}), {4, 0});
}

TEST(RaggedFiles, HaveOneOrderAtAnyWorldAndAfterAResume) {
  std::mt19937_64 random(37);
  std::vector<Samples> files(4, Samples(57));
  for (auto& lengths : files)
    for (auto& length : lengths) length = static_cast<std::int64_t>(1 + random() % 30);
  files[2].resize(1);
  const Texts texts(files);
  const auto data = texts.open();
  for (const auto bucket : {0, 8}) {
    BatchOptions options{.global_batch_size = 8, .shuffle = true};
    if (bucket > 0) options.bucket_samples = bucket;
    const auto alone = in_order(World(data, 1, true, 4), options);
    EXPECT_EQ(sorted(alone), indices(std::ssize(texts.all_lengths)));
    for (const int ranks : {2, 3}) EXPECT_EQ(in_order(World(data, ranks, true, 4), options), alone);
    Json position;
    auto seen = in_order(World(data, 2, true, 4), options, 5, &position);
    const World later(texts.open(), 3, true, 99);
    for (const auto& state : later.states) state->restore(Json::parse(position.dump()));
    options.global_batch_size = 7;
    const auto rest = in_order(later, options);
    seen.insert(seen.end(), rest.begin(), rest.end());
    EXPECT_EQ(seen, alone);
  }
}

TEST(RaggedFiles, CompareEachFileOverTheRanks) {
  const Texts texts({{3, 0}, {2}}), other({{3, 0}, {2}});
  const auto print = source_of(texts.open())->fingerprint();
  EXPECT_EQ(print.count, 3);
  ASSERT_EQ(print.parts.size(), 2u);
  EXPECT_FALSE(difference(print, "a", source_of(other.open())->fingerprint(), "b"));
  {
    H5File file(other.paths[1]);
    write_numbers(file, "tokens", {7, 8});
    write_numbers(file, "offsets", {0, 2});
    write_numbers(file, "y", {2});
  }
  EXPECT_EQ(difference(print, "a", source_of(other.open())->fingerprint(), "b").value_or(""),
            "the values of part1.h5 on a and of part1.h5 on b differ");
}

TEST(RaggedFiles, RefusesFilesThatDoNotGoTogether) {
  const Texts texts({{3, 0}, {2}});
  const auto says = [&](const RaggedOptions& options = {.values = {"tokens"}, .columns = {"y"}},
                        ExitCode code = ExitCode::data) {
    return refused([&] { Dataset::ragged(texts.paths, options).count(); }, code);
  };
  const auto rewrite = [&](const Samples& offsets, hid_t type, const char* label) {
    H5File file(texts.paths[1]);
    write_numbers(file, "tokens", {7, 8}, {}, type);
    write_numbers(file, "offsets", offsets);
    write_numbers(file, label, indices(std::ssize(offsets) - 1));
  };
  const auto expect = [&](const std::string& said, const std::string& fact) {
    EXPECT_NE(said.find(fact), std::string::npos) << said;
  };
  rewrite({0, 2}, H5T_STD_I32LE, "y");
  expect(says(),
         "opening " + texts.paths[1] + ": column \"tokens\" is Int[-1] there and Long[-1] in " + texts.paths[0]);
  expect(says({.values = {"tokens"}, .padding = std::int64_t{1} << 40}, ExitCode::usage),
         texts.paths[1] + ":/tokens: its type, Int, cannot hold RaggedOptions::padding");
  rewrite({0, 2}, H5T_STD_I64LE, "label");
  expect(says(), texts.paths[1]);
  EXPECT_EQ(Dataset::ragged(texts.paths, {.values = {"tokens"}}).count(), 3);
  {
    H5File file(texts.paths[1]);
    write_numbers(file, "tokens", {});
    write_numbers(file, "offsets", {0});
    write_numbers(file, "y", {});
  }
  expect(says(), "there are fewer than two, and so no samples");
  // Offsets that go on from the file before.
  rewrite({3, 5}, H5T_STD_I64LE, "y");
  expect(says(), "reading the offsets " + texts.paths[1]);
  expect(refused([] { Dataset::ragged(std::vector<std::string>{}, {.values = {"tokens"}}); }), "there are no files");
}

TEST(RaggedFiles, AFailedOpeningMayBeTriedAgain) {
  const Texts texts({{3, 0}, {2}});
  const auto data = texts.open();
  const auto hidden = texts.paths[1] + ".hidden";
  std::filesystem::rename(texts.paths[1], hidden);
  refused([&] { data.count(); });
  std::filesystem::rename(hidden, texts.paths[1]);
  texts.expect(data.read(indices(3)), indices(3));
  const auto one = std::filesystem::path(texts.paths[0]);
  EXPECT_EQ(Dataset::ragged(one, {.values = {"tokens"}}).count(), 2);
  EXPECT_EQ(Dataset::ragged({texts.paths[1].c_str(), texts.paths[0].c_str()}, {.values = {"tokens"}}).count(), 3);
}

}  // namespace
}  // namespace muster::detail::data::ragged_files_test
