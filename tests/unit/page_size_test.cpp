// Whatever depends on the size of memory pages, with each that Linux has.
#include "base/page_size.hpp"
#include "node/bucket_reduction.hpp"
#include "node/communicator.hpp"
#include "node/shared_segment.hpp"
#include "optim/dirty_pages.hpp"
#include "support/large_pages.hpp"
#include "unit/node_threads.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace muster::detail::page_size_test {
namespace {

using optim::DirtyPages;

class Pages : public testing::TestWithParam<int> {
 protected:
  const std::size_t page_ = static_cast<std::size_t>(GetParam()) << 10;
  const test::PageSize size_{page_};

  static std::size_t beyond_a_page(const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) % page_size();
  }
};
INSTANTIATE_TEST_SUITE_P(Kib, Pages, testing::Values(4, 16, 64), testing::PrintToStringParamName());

TEST_P(Pages, AreAsLargeAsIsSaid) {
  EXPECT_EQ(page_size(), page_);
  const auto memory = node::local_memory(page_ + 1);
  EXPECT_EQ(beyond_a_page(memory.get()), 0U);
  EXPECT_EQ(node::whole_pages(1), page_);
  EXPECT_EQ(node::whole_pages(page_), page_);
  for (const int ranks : {1, 2, 100, 1000})
    for (const auto bytes :
         {node::NodeCommunicator::memory_bytes(ranks), node::BucketReduction::memory_bytes(ranks, 3, 5)})
      EXPECT_EQ(bytes % node::cache_line, 0U);
}

TEST_P(Pages, OfASegmentAreMappedTwiceAndFreed) {
  auto segment = node::SharedSegment::create(8 * page_);
  segment.unlink();
  EXPECT_EQ(beyond_a_page(segment.data()), 0U);
  segment.reserve(page_ / 2, 4 * page_);
  segment.data()[3 * page_] = std::byte{7};
  const auto view = segment.private_view(2 * page_, 2 * page_);
  EXPECT_EQ(view.get()[page_], std::byte{7});
  view.get()[page_] = std::byte{8};
  EXPECT_EQ(segment.data()[3 * page_], std::byte{7});
  node::SharedSegment::drop_private_pages(view.get() + page_, page_);
  EXPECT_EQ(view.get()[page_], std::byte{7});
  segment.discard(3 * page_, page_);
#if !defined(MUSTER_EMULATED)  // qemu leaves out MADV_REMOVE
  EXPECT_EQ(segment.data()[3 * page_], std::byte{0});
#endif
}

TEST_P(Pages, OfALargeSegmentAreReservedFromTheMiddleOfOne) {
  constexpr std::size_t bytes = std::size_t{4} << 20;  // as large as two huge pages, which is another way
  auto segment = node::SharedSegment::create(bytes + page_);
  segment.unlink();
  segment.reserve(100, bytes);
  segment.data()[bytes] = std::byte{1};
  EXPECT_EQ(segment.data()[bytes], std::byte{1}) << "it would have been a SIGBUS";
}

TEST_P(Pages, ThatWereWrittenAreKnownByTheKernelAndByComparison) {
  auto segment = node::SharedSegment::create(8 * page_);
  segment.unlink();
  segment.reserve(0, 8 * page_);
  for (const auto by : {DirtyPages::Method::kernel, DirtyPages::Method::comparison}) {
    const auto view = segment.private_view(0, 8 * page_);
    const DirtyPages written(view.get(), segment.data(), 8 * page_, by);
    segment.data()[3 * page_] = std::byte{7};
    EXPECT_EQ(view.get()[3 * page_], std::byte{7});
    EXPECT_FALSE(written.any_written(0, 8 * page_)) << "what is read, or written by others, is not";
    view.get()[6 * page_ - 1] = std::byte{1};
    EXPECT_TRUE(written.any_written(0, 8 * page_));
    EXPECT_TRUE(written.any_written(5 * page_, page_));
    EXPECT_FALSE(written.any_written(0, 5 * page_));
    EXPECT_FALSE(written.any_written(6 * page_, 2 * page_));
    node::SharedSegment::drop_private_pages(view.get() + 5 * page_, page_);
    EXPECT_FALSE(written.any_written(0, 8 * page_));
  }
}

TEST_P(Pages, HoldTheMemoryOfCollectives) {
  for (const int ranks : {2, 5})
    for (const std::size_t count : {std::size_t{3}, std::size_t{100'003}})
      test::on_ranks(ranks, count * sizeof(float), [&](node::NodeCommunicator& local, const node::Region& region) {
        std::vector<float> own(count, 1.0F);
        auto* const registered = reinterpret_cast<float*>(region.of(local.rank()));
        std::fill_n(registered, count, 1.0F);
        for (float* const data : {own.data(), registered}) {
          test::wait(local, local.all_reduce(data, count, {}));
          EXPECT_EQ(data[0], static_cast<float>(ranks));
          EXPECT_EQ(data[count - 1], static_cast<float>(ranks));
        }
      });
}

TEST(LargePages, AreRefusedWhatTheyDoNotDivide) {
  const test::PageSize size(std::size_t{64} << 10);
  auto segment = node::SharedSegment::create(std::size_t{128} << 10);
  segment.unlink();
  EXPECT_EQ(::madvise(segment.data() + 4096, 4096, MADV_WILLNEED), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_ANY_THROW(segment.private_view(4096, 4096));
  EXPECT_ANY_THROW(node::SharedSegment::drop_private_pages(segment.data(), 4096));
}

}  // namespace
}  // namespace muster::detail::page_size_test
