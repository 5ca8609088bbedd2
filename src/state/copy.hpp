// Copies values from one tensor to another.
#pragma once

#include <ATen/core/Tensor.h>

namespace muster::detail::state {

/// Does to.copy_(from) without gradients. The shapes must be the same. Large tensors in CPU memory are written past the
/// cache, which avoids reading the memory that is overwritten.
void copy_values(const at::Tensor& to, const at::Tensor& from);

}  // namespace muster::detail::state
