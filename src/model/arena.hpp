// Where gradients are born: blocks of node-shared memory that torch's CPU allocator hands out during backward().
//
// While an Arena lives, a tensor that autograd allocates inside backward() and that has exactly the size of one of its
// blocks lies in that block, if it is free. Everything else comes from the allocator that was there before. Tensors may
// outlive the arena: the memory stays until the last of them is freed.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace muster::model {

class Arena {
 public:
  /// Smaller tensors never come from an arena.
  static constexpr std::size_t smallest = std::size_t{16} << 10;

  /// Blocks of these sizes (bytes), one after the other from `memory` on, which `owner` keeps alive.
  Arena(std::byte* memory, const std::vector<std::size_t>& sizes, std::shared_ptr<void> owner);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Bytes of memory for blocks of these sizes.
  static std::size_t bytes(const std::vector<std::size_t>& sizes);

  /// A free block of that size, null if there is none, and back again.
  std::byte* take(std::size_t size);
  void give_back(std::byte* block);

  struct Blocks;

 private:
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace muster::model
