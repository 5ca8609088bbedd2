#include "optim/dirty_pages.hpp"

#include "base/page_size.hpp"
#include "node/shared_segment.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

namespace muster::detail::optim {
namespace {

// Bits of an entry in /proc/self/pagemap, which has one entry for each page of the process's address space.
constexpr std::uint64_t in_memory = std::uint64_t{1} << 63;
constexpr std::uint64_t swapped_out = std::uint64_t{1} << 62;
constexpr std::uint64_t of_a_file = std::uint64_t{1} << 61;  ///< set if the page is part of a file or of shared memory

}  // namespace

DirtyPages::DirtyPages(std::byte* view, const std::byte* shared, std::size_t bytes, Method method)
    : view_(view), shared_(shared) {
  if (method == Method::comparison || bytes < page_size()) return;
  pagemap_ = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (pagemap_ < 0) return;
  // Tests with a write whether the kernel reports written pages: in a sandbox, /proc may be an imitation.
  auto* const byte = static_cast<volatile std::byte*>(view_);
  const auto value = *byte;
  const bool untouched = ask_kernel(0, page_size()) == 0;
  *byte = value;
  const bool written = ask_kernel(0, page_size()) == 1;
  node::SharedSegment::drop_private_pages(view_, page_size());
  if (!untouched || !written) ::close(std::exchange(pagemap_, -1));
}

DirtyPages::~DirtyPages() {
  if (pagemap_ >= 0) ::close(pagemap_);
}

bool DirtyPages::any_written(std::size_t first, std::size_t bytes) const {
  if (pagemap_ >= 0)
    if (const int found = ask_kernel(first, bytes); found >= 0) return found == 1;
  return std::memcmp(view_ + first, shared_ + first, bytes) != 0;
}

int DirtyPages::ask_kernel(std::size_t first, std::size_t bytes) const {
  std::array<std::uint64_t, 2048> entries;
  const auto begin = (reinterpret_cast<std::uintptr_t>(view_) + first) / kernel_page_size();
  const auto pages = bytes / kernel_page_size();
  for (std::size_t done = 0; done < pages;) {
    const auto want = std::min(entries.size(), pages - done) * sizeof entries[0];
    const auto got = ::pread(pagemap_, entries.data(), want, static_cast<off_t>((begin + done) * sizeof entries[0]));
    if (got != static_cast<ssize_t>(want)) return -1;
    const auto count = want / sizeof entries[0];
    if (std::any_of(entries.begin(), entries.begin() + static_cast<std::ptrdiff_t>(count),
                    [](auto entry) { return (entry & (in_memory | swapped_out)) != 0 && (entry & of_a_file) == 0; }))
      return 1;
    done += count;
  }
  return 0;
}

}  // namespace muster::detail::optim
