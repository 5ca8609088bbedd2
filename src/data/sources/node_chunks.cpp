#include "data/sources/node_chunks.hpp"

#include "data/sources/permutation.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

namespace muster::detail::data {

std::size_t NodeChunks::add(const void* column, const node::SlotArray& chunks, const std::string& origin) {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(chunks.count, chunks.bytes, &bytes) || __builtin_add_overflow(bytes_, bytes, &bytes_))
    bytes_ = std::numeric_limits<std::size_t>::max();
  origin_ = mix(mix(mix(origin_, std::hash<std::string>()(origin)), chunks.count), chunks.bytes);
  columns_.push_back(column);
  arrays_.push_back(chunks);
  return arrays_.size() - 1;
}

void NodeChunks::attach(std::unique_ptr<const node::SharedSlots> slots) {
  owned_ = std::move(slots);
  slots_.store(owned_.get(), std::memory_order_release);
  for (auto& kept : cache_.take_all())
    if (!give_to_node(kept)) cache_.keep(kept.key, kept.chunk, kept.bytes, kept.rows, kept.taken);
}

/// Copies a kept chunk into its slot. False if it has no slot, or if there is no memory for the slot. If another rank
/// has claimed the slot, that rank stores the same chunk.
bool NodeChunks::give_to_node(const ChunkCache::Kept& kept) const {
  const auto column = std::ranges::find(columns_, kept.key.first);
  if (column == columns_.end()) return false;
  const auto array = static_cast<std::size_t>(column - columns_.begin());
  auto claim = owned_->claim(array, static_cast<std::size_t>(kept.key.second));
  if (!claim) return true;
  if (!claim->reserve()) return false;
  std::copy_n(kept.chunk.get(), kept.bytes, claim->memory().begin());
  claim->finish();
  return true;
}

}  // namespace muster::detail::data
