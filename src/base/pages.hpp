// Memory in whole pages, which goes back to the kernel as soon as it is freed. malloc would keep freed memory in a pool
// of each thread, so large pieces that several threads take and free would add up.
#pragma once

#include "base/export.hpp"

#include <cstddef>
#include <utility>

namespace muster::detail {

/// Owns memory in whole pages. Move-only.
class MUSTER_INTERNAL_API Pages {
 public:
  Pages() = default;
  /// Takes `bytes` > 0 of memory, all zero. Throws std::bad_alloc if the kernel refuses them.
  explicit Pages(std::size_t bytes);
  /// Like Pages(bytes), but from 2 MiB on, the memory is aligned to 2 MiB, so that the kernel may use large pages.
  static Pages large(std::size_t bytes);
  Pages(Pages&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Pages();

  /// The memory; null if the object holds none.
  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace muster::detail
