#include "base/page_size.hpp"

#include <unistd.h>

#include <atomic>

namespace muster::detail {
namespace {

std::atomic<std::size_t> size_for_tests = 0;

}  // namespace

std::size_t page_size() noexcept {
  const auto bytes = size_for_tests.load(std::memory_order_relaxed);
  return bytes != 0 ? bytes : kernel_page_size();
}

std::size_t kernel_page_size() noexcept {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

void set_page_size(std::size_t bytes) noexcept { size_for_tests = bytes; }

}  // namespace muster::detail
