// Lets gradients be made in node-shared memory: torch's CPU allocator hands out blocks of it during backward().
//
// While a GradientAllocator lives, a tensor that autograd allocates on its way to one of its parameters, and that has
// the parameter's size, lies in one of its blocks if one is free. Everything else comes from the allocator that was
// there before. Tensors may outlive it: the memory stays until the last of them is freed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace muster::detail::gradients {

class GradientAllocator {
 public:
  /// Smaller tensors never lie in a block.
  static constexpr std::size_t smallest = std::size_t{16} << 10;

  /// A block for the gradient of each parameter, one after the other from `memory` on, which `lifetime` keeps.
  /// Behind them is room for one more of each size, for what a convolution's backward puts a gradient together in:
  /// `reserve` takes memory for it when it is first needed, and says whether there was any.
  GradientAllocator(std::byte* memory, const std::vector<at::Tensor>& parameters, std::shared_ptr<void> lifetime,
                    std::function<bool(std::byte* first, std::size_t bytes)> reserve);
  ~GradientAllocator();
  GradientAllocator(const GradientAllocator&) = delete;
  GradientAllocator& operator=(const GradientAllocator&) = delete;

  /// Bytes of memory for these parameters, and of the room behind.
  static std::size_t bytes(const std::vector<at::Tensor>& parameters);
  static std::size_t spare_bytes(const std::vector<at::Tensor>& parameters);

  /// A free block of that size (bytes), null if there is none.
  std::byte* allocate(std::size_t size);
  void deallocate(std::byte* block);

  struct Pool;

 private:
  std::shared_ptr<Pool> pool_;
};

}  // namespace muster::detail::gradients
