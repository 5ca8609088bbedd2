#include "base/pages.hpp"

#include <sys/mman.h>

#include <new>

namespace muster::detail {

Pages::Pages(std::size_t bytes) {
  void* const address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(address);
  bytes_ = bytes;
}

Pages::~Pages() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

}  // namespace muster::detail
