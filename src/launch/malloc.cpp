#include "launch/malloc.hpp"

#include <malloc.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace muster::detail::launch {

void prepare_malloc() {
#ifdef __GLIBC__
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, 2'000'000'000);
  ::mallopt(M_TOP_PAD, 64 << 20);
  constexpr std::size_t bytes = std::size_t{1} << 30, huge_page = std::size_t{2} << 20;
  if (void* const memory = std::malloc(bytes)) {
    const auto begin = (reinterpret_cast<std::uintptr_t>(memory) + huge_page - 1) / huge_page * huge_page;
    ::madvise(reinterpret_cast<void*>(begin), bytes - huge_page, MADV_HUGEPAGE);
    std::free(memory);
  }
#endif
}

}  // namespace muster::detail::launch
