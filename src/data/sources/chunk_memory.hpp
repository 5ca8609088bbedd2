// Memory for decoded chunks.
#pragma once

#include "base/pages.hpp"

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace muster::detail::data {

/// Chunks of one size lie side by side in blocks, for which the kernel can use large pages. Providing small
/// pages took a fifth of the time of a first pass over gzipped chunks. A block goes back to the kernel once none of its
/// chunks is used; a few blocks are kept for later chunks. Thread-safe.
class ChunkMemory {
 public:
  /// A chunk may outlive the ChunkMemory.
  using Chunk = std::shared_ptr<std::byte>;

  /// Memory for a chunk of `bytes` > 0, aligned to 64 bytes. What is in it is undefined.
  Chunk take(std::size_t bytes);

 private:
  struct Block {
    Pages pages;
    std::size_t chunks;
    std::vector<std::byte*> free;
  };
  /// The blocks of chunks of one size, those with free ones first.
  struct Blocks {
    std::list<Block> all;
    std::size_t chunks = 0, unused = 0;  ///< `unused`: blocks of which all chunks are free
  };
  struct State {
    std::mutex mutex;
    std::map<std::size_t, Blocks> of_size;
  };
  static void give_back(State& state, std::size_t size, std::list<Block>::iterator block, std::byte* chunk);

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace muster::detail::data
