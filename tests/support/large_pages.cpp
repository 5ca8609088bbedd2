#include "support/large_pages.hpp"

#include "base/page_size.hpp"

#include <dlfcn.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

namespace muster::test {
namespace {

template <class Function>
Function* original(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

bool larger() { return detail::page_size() != detail::kernel_page_size(); }
bool divides(std::uintptr_t number) { return number % detail::page_size() == 0; }

void* map(void* address, std::size_t bytes, int protection, int flags, int file, off_t offset) {
  static auto* const call = original<void*(void*, std::size_t, int, int, int, off_t)>("mmap");
  if (!larger()) return call(address, bytes, protection, flags, file, offset);
  if (!divides(reinterpret_cast<std::uintptr_t>(address)) || !divides(static_cast<std::uintptr_t>(offset))) {
    errno = EINVAL;
    return MAP_FAILED;
  }
  if ((flags & MAP_FIXED) != 0) return call(address, bytes, protection, flags, file, offset);
  const auto page = detail::page_size();
  void* const room = call(nullptr, bytes + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return room;
  const auto begin = (reinterpret_cast<std::uintptr_t>(room) + page - 1) / page * page;
  return call(reinterpret_cast<void*>(begin), bytes, protection, flags | MAP_FIXED, file, offset);
}

}  // namespace

PageSize::PageSize(std::size_t bytes) { detail::set_page_size(bytes); }
PageSize::~PageSize() { detail::set_page_size(0); }

}  // namespace muster::test

// C code may use either of two names of mmap.
extern "C" {

void* mmap(void* address, std::size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
  return muster::test::map(address, bytes, protection, flags, file, offset);
}

void* mmap64(void* address, std::size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
  return muster::test::map(address, bytes, protection, flags, file, offset);
}

int madvise(void* address, std::size_t bytes, int advice) noexcept {
  static auto* const call = muster::test::original<int(void*, std::size_t, int)>("madvise");
  using muster::test::divides;
  // These two would take the rest of the last page along.
  const bool whole = advice != MADV_DONTNEED && advice != MADV_REMOVE;
  if (muster::test::larger() && !(divides(reinterpret_cast<std::uintptr_t>(address)) && (whole || divides(bytes)))) {
    errno = EINVAL;
    return -1;
  }
  return call(address, bytes, advice);
}

}  // extern "C"
