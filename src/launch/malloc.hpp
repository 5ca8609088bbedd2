// How malloc treats the memory of large tensors.
#pragma once

#include "base/export.hpp"

namespace muster::detail::launch {

/// Makes malloc keep the memory of large tensors in the heap; otherwise the kernel would map and clear it anew in every
/// step. Asks for huge pages for the first GiB of the heap, which takes memory only when it is used.
MUSTER_INTERNAL_API void prepare_malloc();

}  // namespace muster::detail::launch
