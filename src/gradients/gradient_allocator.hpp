// Makes backward() put gradients into node-shared memory: torch's CPU allocator hands out blocks of that memory.
//
// The memory has a block for each parameter. While a GradientAllocator lives, a tensor lies in a block if autograd
// allocates it for the gradient of one of the parameters, it has the parameter's size, at least `smallest`, and a block
// of this size is free. All other tensors come from the previous allocator. Tensors may outlive the GradientAllocator:
// the memory stays until the last of them is freed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace muster::detail::gradients {

class GradientAllocator {
 public:
  /// In bytes; smaller tensors never lie in a block.
  static constexpr std::size_t smallest = std::size_t{16} << 10;

  /// Makes a block for the gradient of each parameter, one after the other from `memory` on; `lifetime` keeps the
  /// memory alive. One spare block of each size follows, since a convolution's backward() needs a second tensor to
  /// assemble a gradient. `reserve` is called at the first use of a spare block, to reserve its memory; it returns
  /// false if there is no memory left.
  GradientAllocator(std::byte* memory, const std::vector<at::Tensor>& parameters, std::shared_ptr<void> lifetime,
                    std::function<bool(std::byte* first, std::size_t bytes)> reserve);
  ~GradientAllocator();
  GradientAllocator(const GradientAllocator&) = delete;
  GradientAllocator& operator=(const GradientAllocator&) = delete;

  /// Return the bytes needed for the blocks of these parameters, and for their spare blocks.
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
