// Finds the pages of a private view of shared memory (SharedSegment::private_view) that this process has written to.
#pragma once

#include <cstddef>

namespace muster::detail::optim {

/// Asks the kernel. As long as nobody writes to a page of a private view, it is a page of the shared segment; the first
/// write replaces it by a private page of this process, and bit 61 of its entry in /proc/self/pagemap is cleared. If
/// that file cannot be used, contents are compared; then a write that changes no value is not found.
class DirtyPages {
 public:
  enum class Method { kernel, comparison };

  /// `view`: a private view of the `bytes` bytes at `shared`, not written to yet. The constructor writes to its first
  /// page, for a test, and drops the change.
  DirtyPages(std::byte* view, const std::byte* shared, std::size_t bytes, Method method = Method::kernel);
  DirtyPages(const DirtyPages&) = delete;
  DirtyPages& operator=(const DirtyPages&) = delete;
  ~DirtyPages();

  /// True if all written pages are found; false if a write that changes no value is not.
  bool finds_all() const noexcept { return pagemap_ >= 0; }
  /// True if any page in this range was written to since it was last dropped. `first`, `bytes`: the range in bytes,
  /// whole pages. Nobody may write to the segment during the call.
  bool any_written(std::size_t first, std::size_t bytes) const;

 private:
  /// Returns 1 if a page in the range was written to, 0 if none was, -1 if the kernel does not say.
  int ask_kernel(std::size_t first, std::size_t bytes) const;

  std::byte* view_;
  const std::byte* shared_;
  int pagemap_ = -1;  ///< file descriptor; -1 if contents are compared
};

}  // namespace muster::detail::optim
