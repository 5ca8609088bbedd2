#include "data/sources/chunk_memory.hpp"

#include <algorithm>

namespace muster::detail::data {
namespace {

constexpr std::size_t alignment = 64;                                       // bytes
constexpr std::size_t smallest_block = 64 << 10, largest_block = 16 << 20;  // bytes, unless a chunk is larger
constexpr std::size_t most_unused = 4;                                      // blocks of a size

}  // namespace

ChunkMemory::Chunk ChunkMemory::take(std::size_t bytes) {
  const auto size = (bytes + alignment - 1) / alignment * alignment;
  std::list<Block>::iterator block;
  std::byte* chunk;
  {
    const std::lock_guard lock(state_->mutex);
    auto& blocks = state_->of_size[size];
    if (blocks.all.empty() || blocks.all.front().free.empty()) {
      // The new block has as many chunks as all others together, so that few chunks take little memory.
      const auto bytes_of_block = std::clamp(blocks.chunks * size, smallest_block, largest_block);
      const auto chunks = std::max<std::size_t>(1, bytes_of_block / size);
      Block more{Pages::large(chunks * size), chunks, {}};
      for (auto i = chunks; i-- > 0;) more.free.push_back(more.pages.data() + i * size);
      blocks.all.push_front(std::move(more));
      blocks.chunks += chunks;
      ++blocks.unused;
    }
    block = blocks.all.begin();
    chunk = block->free.back();
    if (block->free.size() == block->chunks) --blocks.unused;
    block->free.pop_back();
    if (block->free.empty()) blocks.all.splice(blocks.all.end(), blocks.all, block);
  }
  return {chunk, [state = state_, size, block](std::byte* given) { give_back(*state, size, block, given); }};
}

void ChunkMemory::give_back(State& state, std::size_t size, std::list<Block>::iterator block, std::byte* chunk) {
  std::list<Block> freed;  // without the lock
  const std::lock_guard lock(state.mutex);
  auto& blocks = state.of_size.find(size)->second;
  if (block->free.empty()) blocks.all.splice(blocks.all.begin(), blocks.all, block);
  block->free.push_back(chunk);
  if (block->free.size() < block->chunks) return;
  if (blocks.unused < most_unused) {
    ++blocks.unused;
  } else {
    blocks.chunks -= block->chunks;
    freed.splice(freed.end(), blocks.all, block);
  }
}

}  // namespace muster::detail::data
