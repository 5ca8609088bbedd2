#include "support/failing_memory.hpp"

#include <cstddef>
#include <cstdlib>
#include <new>

namespace muster::test {
namespace {

thread_local int left = -1;

}  // namespace

void fail_allocation_after(int allocations) noexcept { left = allocations; }

}  // namespace muster::test

void* operator new(std::size_t bytes) {
  using muster::test::left;
  if (left >= 0 && left-- == 0) throw std::bad_alloc();
  if (void* const memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
