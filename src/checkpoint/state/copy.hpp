// Values from one tensor to another.
#pragma once

#include <ATen/core/Tensor.h>

namespace muster::detail::checkpoint {

/// to.copy_(from) without gradients, of the same shape. Large ones in the CPU's memory go past its cache, where they
/// would be of no use: that saves reading what is written over.
void copy_values(const at::Tensor& to, const at::Tensor& from);

}  // namespace muster::detail::checkpoint
