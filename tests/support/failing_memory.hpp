// Replaces operator new in a test program, so that an allocation can be made to fail.
#pragma once

namespace muster::test {

/// The allocation of this thread after `allocations` more throws std::bad_alloc; -1: none does.
void fail_allocation_after(int allocations) noexcept;

}  // namespace muster::test
