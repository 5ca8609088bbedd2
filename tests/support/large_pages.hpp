// A kernel with larger memory pages than this machine's. Its mmap() and madvise() replace the C library's, so a test
// that wants it is linked with large_pages.cpp.
#pragma once

#include <cstddef>

namespace muster::test {

/// While it lives, page_size() is `bytes`, new mappings begin at a multiple of it, and mmap() and madvise() refuse
/// (EINVAL) what that size does not divide.
class PageSize {
 public:
  explicit PageSize(std::size_t bytes);
  PageSize(const PageSize&) = delete;
  PageSize& operator=(const PageSize&) = delete;
  ~PageSize();
};

}  // namespace muster::test
