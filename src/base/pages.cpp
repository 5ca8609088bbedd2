#include "base/pages.hpp"

#include "base/page_size.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace muster::detail {

Pages::Pages(std::size_t bytes) {
  void* const address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(address);
  bytes_ = bytes;
}

Pages Pages::large(std::size_t bytes) {
  constexpr std::size_t large_page = 2 << 20;
  if (bytes < large_page) return Pages(bytes);
  Pages pages(bytes + large_page);
  const auto skipped = -reinterpret_cast<std::uintptr_t>(pages.data_) % large_page;
  const auto used = (bytes + page_size() - 1) / page_size() * page_size();
  if (skipped > 0) ::munmap(pages.data_, skipped);
  if (skipped + used < pages.bytes_) ::munmap(pages.data_ + skipped + used, pages.bytes_ - skipped - used);
  pages.data_ += skipped;
  pages.bytes_ = bytes;
  ::madvise(pages.data_, used, MADV_HUGEPAGE);  // only a hint, so errors are ignored
  return pages;
}

Pages::~Pages() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

}  // namespace muster::detail
