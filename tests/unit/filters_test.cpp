// The filters of HDF5, undone without HDF5: what the codecs make, and what is damaged.
#include "hdf5/codecs.hpp"
#include "hdf5/filter_pipeline.hpp"
#include "muster/error.hpp"
#include "support/chunk_encoders.hpp"
#include "support/chunk_fuzz.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::hdf5::filters_test {
namespace {

using test::Bytes;

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::data);
    return error.what();
  }
  return "no error";
}

TEST(Filters, ThatAreNotKnownAreLeftToHdf5) {
  using Filters = std::vector<Filter>;
  EXPECT_TRUE(FilterPipeline(Filters{}).decodes());
  EXPECT_TRUE(FilterPipeline(Filters{{.id = H5Z_FILTER_DEFLATE}}).decodes());
  EXPECT_FALSE(FilterPipeline(Filters{{.id = H5Z_FILTER_NBIT}}).decodes());
  EXPECT_FALSE(FilterPipeline(Filters{{.id = H5Z_FILTER_SCALEOFFSET}}).decodes());
  EXPECT_FALSE(FilterPipeline(Filters{{.id = 300}}).decodes());
  EXPECT_FALSE(FilterPipeline(Filters{{.id = H5Z_FILTER_SHUFFLE, .values = {0}}}).decodes());
  EXPECT_FALSE(FilterPipeline(Filters{{.id = H5Z_FILTER_DEFLATE}, {.id = H5Z_FILTER_DEFLATE}}).decodes());
  EXPECT_FALSE(FilterPipeline(Filters{{.id = filter_bitshuffle, .values = {0, 4, 8, 0, 9}}}).decodes());
  EXPECT_FALSE(FilterPipeline(Filters(33, {.id = H5Z_FILTER_FLETCHER32})).decodes());
  const FilterPipeline two(Filters{{.id = H5Z_FILTER_SHUFFLE, .values = {4}}, {.id = H5Z_FILTER_DEFLATE}});
  EXPECT_FALSE(two.is_plain(0));
  EXPECT_FALSE(two.is_plain(2));
  EXPECT_TRUE(two.is_plain(3));
}

TEST(Filters, ThatNobodyHasAreAnError) {
  EXPECT_EQ(message_of([] { require_filters({{.id = 300, .name = "mine"}}, "reading x"); }),
            "reading x: it is compressed by a filter that neither muster nor HDF5 was built with here (mine). "
            "Store it uncompressed or with deflate; h5repack does that");
  if (decoder_of({.id = filter_zstd})) return;
  EXPECT_EQ(message_of([] {
              require_filters({{.id = H5Z_FILTER_DEFLATE}, {.id = filter_zstd}}, "reading x");
            }),
            "reading x: it is compressed by a filter that neither muster nor HDF5 was built with here (32015). "
            "Build muster again where libzstd-dev is installed, or store it with deflate; h5repack does that");
}

TEST(Filters, ThatOnlyMusterHasAreNoneForWhatHdf5MustRead) {
  if (!decoder_of({.id = filter_lzf})) GTEST_SKIP() << "built without lzf";
  const Filter lzf{.id = filter_lzf, .name = "lzf"};
  EXPECT_EQ(message_of([&] { require_filters({lzf}, "reading x"); }),
            "reading x: only HDF5 can read it in this form, and this HDF5 was not built with its filter "
            "(lzf); muster loads no filter plugins. "
            "`muster convert h5` makes a copy that muster can read");
  EXPECT_EQ(message_of([&] {
              require_filters({{.id = H5Z_FILTER_NBIT}, lzf}, "reading x");
            }),
            "reading x: only HDF5 can read it in this form, and this HDF5 was not built with its filter "
            "(lzf); muster loads no filter plugins. "
            "Store it uncompressed or with deflate; h5repack does that");
  EXPECT_NE(message_of([&] {
              require_filters({lzf, {.id = 300, .name = "mine"}}, "reading x");
            }).find("neither muster nor HDF5 was built with here (mine)"),
            std::string::npos);
}

TEST(Filters, DecodeWhatTheCodecsMake) {
  std::mt19937_64 random(3);
  FilterPipeline::Workspace workspace;
  for (const std::size_t value_bytes : {1, 2, 4, 8})
    for (const std::size_t count : {1, 7, 8, 63, 64, 100, 1000, 40000})
      for (const auto& filter : test::known_filters(value_bytes)) {
        const auto chunk = test::smooth_values(random, count, value_bytes);
        Bytes decoded(chunk.size());
        FilterPipeline({filter}).decode(test::encoded(filter, chunk), 0, decoded, workspace, "test");
        EXPECT_EQ(decoded, chunk) << filter.text() << " " << count << " values of " << value_bytes;
      }
  for (const std::size_t value_bytes : {3, 5, 12, 16, 24}) {
    const auto chunk = test::smooth_values(random, 1000, value_bytes);
    for (const auto& filter :
         {Filter{.id = H5Z_FILTER_SHUFFLE, .values = {static_cast<unsigned>(value_bytes)}},
          Filter{.id = filter_bitshuffle, .values = {0, 4, static_cast<unsigned>(value_bytes), 0, 0}}}) {
      Bytes decoded(chunk.size());
      FilterPipeline({filter}).decode(test::encoded(filter, chunk), 0, decoded, workspace, "test");
      EXPECT_EQ(decoded, chunk) << filter.text() << " " << value_bytes;
    }
  }
}

TEST(Filters, DecodeWhatWasShuffledAfterItHadBeenCompressed) {
  std::mt19937_64 random(4);
  FilterPipeline::Workspace workspace;
  const Filter sum{.id = H5Z_FILTER_FLETCHER32};
  for (const unsigned value_bytes : {1, 2, 4, 8})
    for (const std::size_t count : {1, 63, 1000})
      for (const auto& codec : test::known_filters(value_bytes)) {
        const Filter shuffle{.id = H5Z_FILTER_SHUFFLE, .values = {value_bytes}};
        for (const auto& filters : std::vector<std::vector<Filter>>{
                 {codec, shuffle}, {codec, sum, shuffle, sum}, {shuffle, codec, shuffle}, {codec, sum, shuffle}}) {
          const FilterPipeline pipeline(filters);
          if (!pipeline.decodes()) continue;  // two that compress
          const auto chunk = test::smooth_values(random, count, value_bytes);
          for (const std::uint32_t mask : {0, 1, 2}) {
            Bytes decoded(chunk.size());
            pipeline.decode(test::encoded(filters, mask, chunk), mask, decoded, workspace, "test");
            EXPECT_EQ(decoded, chunk) << codec.text() << " " << count << " values of " << value_bytes;
          }
        }
      }
}

TEST(Filters, DecodeTheSwappedChecksumOfOldReleases) {
  Bytes chunk(100, std::byte{7});
  auto stored = test::encoded({.id = H5Z_FILTER_FLETCHER32}, chunk);
  std::swap(stored[100], stored[101]);
  std::swap(stored[102], stored[103]);
  FilterPipeline::Workspace workspace;
  Bytes decoded(100);
  FilterPipeline({Filter{.id = H5Z_FILTER_FLETCHER32}}).decode(stored, 0, decoded, workspace, "test");
  EXPECT_EQ(decoded, chunk);
}

TEST(Filters, StandDamage) {
  for (std::uint64_t seed = 1; seed <= 4000; ++seed) test::fuzz_chunk(seed);
}

}  // namespace
}  // namespace muster::detail::hdf5::filters_test
