// Lets backward() make gradients in node-shared memory: torch's CPU allocator hands out blocks of it.
//
// While a GradientAllocator lives, tensors that autograd allocates for the gradient of one of its parameters, and that
// have the parameter's size, lie in one of its blocks if one is free. All other tensors come from the previous
// allocator. Tensors may outlive the GradientAllocator: the memory stays until the last of them is freed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace muster::detail::gradients {

class GradientAllocator {
 public:
  /// Bytes; smaller tensors never lie in a block.
  static constexpr std::size_t smallest = std::size_t{16} << 10;

  /// Makes a block for the gradient of each parameter, one after the other from `memory` on; `lifetime` keeps the
  /// memory alive. After them comes one spare block of each size, since a convolution's backward() needs a second
  /// tensor to assemble a gradient. `reserve` takes memory for a spare block at its first use; false if there is none.
  GradientAllocator(std::byte* memory, const std::vector<at::Tensor>& parameters, std::shared_ptr<void> lifetime,
                    std::function<bool(std::byte* first, std::size_t bytes)> reserve);
  ~GradientAllocator();
  GradientAllocator(const GradientAllocator&) = delete;
  GradientAllocator& operator=(const GradientAllocator&) = delete;

  /// Return the bytes needed for the blocks of these parameters, and for the spare blocks.
  static std::size_t bytes(const std::vector<at::Tensor>& parameters);
  static std::size_t spare_bytes(const std::vector<at::Tensor>& parameters);

  /// Returns a free block of `size` bytes; null if there is none.
  std::byte* allocate(std::size_t size);
  void deallocate(std::byte* block);

  struct Pool;

 private:
  std::shared_ptr<Pool> pool_;
};

}  // namespace muster::detail::gradients
