// Which pages of a private view of shared memory this process has written to.
#pragma once

#include <cstddef>

namespace muster::detail::optim {

/// The kernel knows: a page of a private view is the segment's until it is written to, then one of this process alone
/// (bit 61 of its entry in /proc/self/pagemap). Where that cannot be read, contents are compared, and a page that was
/// written to without a change of its values is not found.
class DirtyPages {
 public:
  enum class By { kernel, comparison };

  /// `view`: a private view of all `bytes` at `shared`, that nobody has written to. Its first page is tried out.
  DirtyPages(std::byte* view, const std::byte* shared, std::size_t bytes, By by = By::kernel);
  DirtyPages(const DirtyPages&) = delete;
  DirtyPages& operator=(const DirtyPages&) = delete;
  ~DirtyPages();

  /// Whether all pages that were written to are found.
  bool finds_all() const noexcept { return pagemap_ >= 0; }
  /// Whether those whole pages were written to since they were dropped last. Nobody writes to the segment meanwhile.
  bool any(std::size_t first, std::size_t bytes) const;

 private:
  /// Whether there is one; -1 if the kernel does not say.
  int ask_kernel(std::size_t first, std::size_t bytes) const;

  std::byte* view_;
  const std::byte* shared_;
  int pagemap_ = -1;  ///< a file descriptor
};

}  // namespace muster::detail::optim
