// Memory of batches that is used again.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <vector>

namespace muster::detail::data {

/// Gives uninitialised tensors on the CPU. Large ones come from memory that was given before and that no tensor holds
/// any more, views and what autograd has saved included: fresh pages cost the kernel more than reading into them.
/// Thread-safe.
class TensorPool {
 public:
  at::Tensor take(at::IntArrayRef shape, at::ScalarType dtype);

 private:
  std::mutex mutex_;
  std::vector<c10::Storage> storages_;
};

}  // namespace muster::detail::data
