// The size of the machine's memory pages: 4 KiB on x86-64, and 4, 16 or 64 KiB on aarch64.
#pragma once

#include <cstddef>

namespace muster::detail {

/// Bytes of a memory page; mmap() and madvise() take multiples of it.
std::size_t page_size() noexcept;
/// The page size in which the kernel itself counts, as in /proc/self/pagemap; set_page_size() does not change it.
std::size_t kernel_page_size() noexcept;

/// For tests: page_size() returns `bytes`, a multiple of kernel_page_size(), from then on. Call it before any memory is
/// mapped. 0 restores the kernel's size.
void set_page_size(std::size_t bytes) noexcept;

}  // namespace muster::detail
