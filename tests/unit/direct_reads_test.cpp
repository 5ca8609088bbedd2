// Direct reads of files, and the memory for them and for decoded chunks.
#include "data/sources/direct_reads.hpp"
#include "base/file.hpp"
#include "base/pages.hpp"
#include "support/folder.hpp"
#include "support/io_errors.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace muster::detail::data {
namespace {

constexpr std::size_t enough = 64 << 20;

class DirectReadsTest : public ::testing::Test {
 protected:
  DirectReadsTest() : content_(1'234'567, '\0') {
    std::mt19937 random(1);
    for (auto& byte : content_) byte = static_cast<char>(random());
    write_file(folder_ / "data", content_);
    file_.emplace(folder_ / "data", File::Mode::read);
  }

  void SetUp() override {
    if (!DirectReads(enough).request(*file_, 0, 1)) GTEST_SKIP() << "no direct I/O in the folder for temporary files";
  }

  bool is_there(const DirectReads::Part& part, std::uint64_t offset, std::size_t bytes) const {
    return part.bytes().size() == bytes && std::memcmp(part.bytes().data(), content_.data() + offset, bytes) == 0;
  }

  const test::Folder folder_;
  std::string content_;
  std::optional<File> file_;
};

TEST_F(DirectReadsTest, GiveThePartsThatWereRequestedOnce) {
  std::mt19937 random(2);
  DirectReads reads(enough);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::pair<std::uint64_t, std::size_t>> parts{{content_.size() - 1, 1}, {content_.size() - 5000, 5000}};
    for (int i = 0; i < 20; ++i) {
      const auto offset = random() % content_.size();
      parts.emplace_back(offset, std::min<std::size_t>(1 + random() % 100'000, content_.size() - offset));
    }
    for (const auto& [offset, bytes] : parts) EXPECT_TRUE(reads.request(*file_, offset, bytes));
    EXPECT_TRUE(reads.request(*file_, parts[0].first, parts[0].second)) << "it is requested already";
    std::ranges::shuffle(parts, random);
    for (const auto& [offset, bytes] : parts) {
      EXPECT_TRUE(reads.has(*file_, offset));
      const auto part = reads.take(*file_, offset);
      ASSERT_TRUE(part);
      EXPECT_TRUE(is_there(*part, offset, bytes)) << offset << ", " << bytes;
      EXPECT_FALSE(reads.has(*file_, offset));
      EXPECT_FALSE(reads.take(*file_, offset));
    }
  }
}

TEST_F(DirectReadsTest, AreOfTheOpenFileEvenIfAnotherHasItsName) {
  write_file(folder_ / "data", std::string(content_.size(), 'x'));
  DirectReads reads(enough);
  for (std::uint64_t offset = 0; offset < 100'000; offset += 10'000) {
    EXPECT_TRUE(reads.request(*file_, offset, 10'000));
    const auto part = reads.take(*file_, offset);
    ASSERT_TRUE(part);
    EXPECT_TRUE(is_there(*part, offset, 10'000));
  }
}

TEST_F(DirectReadsTest, BeyondTheEndGiveNothing) {
  DirectReads reads(enough);
  EXPECT_TRUE(reads.request(*file_, content_.size() - 10, 11));
  EXPECT_TRUE(reads.request(*file_, content_.size() + 100'000, 1));
  EXPECT_FALSE(reads.take(*file_, content_.size() - 10));
  EXPECT_FALSE(reads.take(*file_, content_.size() + 100'000));
}

TEST_F(DirectReadsTest, DropTheFirstRequestsWhereThereAreTooMany) {
  DirectReads reads(100'000);
  EXPECT_FALSE(reads.request(*file_, 0, 100'001)) << "it would never fit";
  for (std::uint64_t i = 0; i < 30; ++i) {
    EXPECT_TRUE(reads.request(*file_, i * 30'000, 30'000));
    std::uint64_t held = 0;
    for (std::uint64_t other = 0; other <= i; ++other) held += reads.has(*file_, other * 30'000) ? 1 : 0;
    // Three fit. Requests that a thread is reading are not dropped, and there are four threads.
    EXPECT_LE(held, 3 + 4);
    EXPECT_TRUE(reads.has(*file_, i * 30'000));
  }
}

TEST_F(DirectReadsTest, AreDroppedOrThereWhenTheThreadsRest) {
  DirectReads reads(enough);
  for (int round = 0; round < 20; ++round) {
    for (std::uint64_t i = 0; i < 30; ++i) EXPECT_TRUE(reads.request(*file_, i * 30'000, 30'000));
    reads.rest();
    for (std::uint64_t i = 0; i < 30; ++i) {
      const bool was_begun = reads.has(*file_, i * 30'000);
      const auto part = reads.take(*file_, i * 30'000);
      EXPECT_EQ(part.has_value(), was_begun);
      if (part) {
        EXPECT_TRUE(is_there(*part, i * 30'000, 30'000));
      }
    }
  }
}

TEST_F(DirectReadsTest, OfManyThreads) {
  DirectReads reads(1 << 20);
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < 2000; ++i) {
      const auto number = random() % 100;
      const auto offset = number * 10'007, bytes = 5000 + number * 50;
      reads.request(*file_, offset, bytes);
      if (const auto part = reads.take(*file_, random() % 2 == 0 ? offset : random() % 100 * 10'007); part) {
        const auto begin = part->bytes();
        const auto of = (begin.size() - 5000) / 50 * 10'007;
        EXPECT_TRUE(is_there(*part, of, begin.size()));
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed);
  for (auto& thread : threads) thread.join();
}

TEST_F(DirectReadsTest, EndWhereTheFileSystemRefusesThem) {
  for (const int error : {EINVAL, EIO}) {
    DirectReads reads(enough);
    const test::IoError fails("pread", "data", error);
    EXPECT_TRUE(reads.request(*file_, 4096, 100));
    EXPECT_FALSE(reads.take(*file_, 4096));
    EXPECT_EQ(fails.count(), 1);
    EXPECT_EQ(reads.request(*file_, 4096, 100), error == EIO) << "another part may be readable after an EIO";
  }
}

TEST(Pages, AreZeroAndGoBackToTheKernel) {
  Pages pages(100'000);
  EXPECT_EQ(pages.size(), 100'000U);
  EXPECT_EQ(std::count(pages.data(), pages.data() + pages.size(), std::byte{0}), 100'000);
  pages.data()[99'999] = std::byte{7};
  Pages other = std::move(pages);
  EXPECT_EQ(pages.data(), nullptr);
  EXPECT_EQ(other.data()[99'999], std::byte{7});
  pages = Pages(10);
  std::swap(pages, other);
  EXPECT_EQ(pages.size(), 100'000U);
  EXPECT_EQ(other.size(), 10U);
  EXPECT_THROW(Pages(std::size_t{1} << 62), std::bad_alloc);
}

TEST(Pages, LargeOnesAreAligned) {
  for (const std::size_t bytes : {1, 2 << 20, (2 << 20) + 1, (5 << 20) - 4096, 7 << 20}) {
    const auto pages = Pages::large(bytes);
    EXPECT_EQ(pages.size(), bytes);
    if (bytes >= 2 << 20) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pages.data()) % (2 << 20), 0U);
    }
    EXPECT_EQ(std::count(pages.data(), pages.data() + bytes, std::byte{0}), static_cast<std::ptrdiff_t>(bytes));
    std::fill_n(pages.data(), bytes, std::byte{1});
  }
  EXPECT_THROW(Pages::large(std::size_t{1} << 62), std::bad_alloc);
}

}  // namespace
}  // namespace muster::detail::data
