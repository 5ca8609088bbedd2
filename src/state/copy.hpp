// Copies values from one tensor to another.
#pragma once

#include <ATen/core/Tensor.h>

namespace muster::detail::state {

/// False if `to` is expanded (at::Tensor::expand) and its repetitions would get different values.
bool can_copy(const at::Tensor& to, const at::Tensor& from);

/// Does to.copy_(from) without gradients, also if `to` is expanded. The shapes must be the same. For large contiguous
/// tensors of the same type in CPU memory, the writes bypass the cache (on x86), so that the processor does not first
/// read the memory that they overwrite.
void copy_values(const at::Tensor& to, const at::Tensor& from);

}  // namespace muster::detail::state
