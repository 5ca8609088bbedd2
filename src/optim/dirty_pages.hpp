// Finds the pages of a private view of shared memory that this process has written to.
#pragma once

#include <cstddef>

namespace muster::detail::optim {

/// Asks the kernel: a page of a private view belongs to the segment until it is written to; then it is a private page
/// of this process (bit 61 of its entry in /proc/self/pagemap). If that cannot be read, contents are compared instead;
/// a write that changes no value is then not found.
class DirtyPages {
 public:
  enum class Method { kernel, comparison };

  /// `view`: a private view of the `bytes` bytes at `shared`, not written to yet. The first page is used for a test.
  DirtyPages(std::byte* view, const std::byte* shared, std::size_t bytes, Method method = Method::kernel);
  DirtyPages(const DirtyPages&) = delete;
  DirtyPages& operator=(const DirtyPages&) = delete;
  ~DirtyPages();

  /// True if all pages that were written to are found.
  bool finds_all() const noexcept { return pagemap_ >= 0; }
  /// True if any of these whole pages was written to since they were dropped last. Nobody may write to the segment
  /// during the call.
  bool any_written(std::size_t first, std::size_t bytes) const;

 private:
  /// Returns 1 if there is such a page, 0 if not, -1 if the kernel does not say.
  int ask_kernel(std::size_t first, std::size_t bytes) const;

  std::byte* view_;
  const std::byte* shared_;
  int pagemap_ = -1;  ///< file descriptor; -1 if contents are compared
};

}  // namespace muster::detail::optim
