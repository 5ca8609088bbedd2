// Where gradients are born: blocks of node-shared memory that torch's CPU allocator hands out during backward().
//
// While an Arena lives, a tensor that autograd allocates on its way to one of the arena's parameters, and that has the
// parameter's size, lies in a block of the arena if one is free. Everything else comes from the allocator that was
// there before. Tensors may outlive the arena: the memory stays until the last of them is freed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace muster::detail::gradients {

class Arena {
 public:
  /// Smaller tensors never come from an arena.
  static constexpr std::size_t smallest = std::size_t{16} << 10;

  /// A block for the gradient of each parameter, one after the other from `memory` on, which `owner` keeps alive.
  /// Behind them is room for one more of each size, for what a convolution's backward puts a gradient together in:
  /// `reserve` takes memory for it when it is first needed, and says whether there was any.
  Arena(std::byte* memory, const std::vector<at::Tensor>& parameters, std::shared_ptr<void> owner,
        std::function<bool(std::byte* first, std::size_t bytes)> reserve);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Bytes of memory for these parameters, and of the room behind.
  static std::size_t bytes(const std::vector<at::Tensor>& parameters);
  static std::size_t spare_bytes(const std::vector<at::Tensor>& parameters);

  /// A free block of that size (bytes), null if there is none, and back again.
  std::byte* take(std::size_t size);
  void give_back(std::byte* block);

  struct Blocks;

 private:
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace muster::detail::gradients
