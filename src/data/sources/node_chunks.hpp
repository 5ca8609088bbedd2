// Decoded chunks of a dataset that the ranks of a node keep together.
#pragma once

#include "data/sources/chunk_cache.hpp"
#include "node/shared_slots.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace muster::detail::data {

/// The encoded chunks of all columns of a dataset, an array of slots for each column. Until slots are attached, each
/// rank keeps the chunks by itself.
class NodeChunks {
 public:
  /// `cache`: this rank's own, which outlives this.
  explicit NodeChunks(ChunkCache& cache) : cache_(cache) {}

  /// Adds the chunks of a column and returns their array. `column`: as in ChunkCache::Key. `origin`: equal only for
  /// the same data of the same file. Call it before the dataset is read.
  std::size_t add(const void* column, const node::SlotArray& chunks, const std::string& origin);

  /// The size of all chunks; the largest number if it cannot be counted.
  std::size_t bytes() const noexcept { return bytes_; }
  const std::vector<node::SlotArray>& arrays() const noexcept { return arrays_; }
  /// A hash of the columns' origins and sizes.
  std::uint64_t origin() const noexcept { return origin_; }

  /// Moves the chunks that the cache has into the slots. Call it once; other threads may be reading.
  void attach(std::unique_ptr<const node::SharedSlots> slots);
  /// Null until slots are attached.
  const node::SharedSlots* slots() const noexcept { return slots_.load(std::memory_order_acquire); }

 private:
  bool give_to_node(const ChunkCache::Kept& kept) const;

  ChunkCache& cache_;
  std::vector<const void*> columns_;  ///< of each array
  std::vector<node::SlotArray> arrays_;
  std::size_t bytes_ = 0;
  std::uint64_t origin_ = 0;
  std::unique_ptr<const node::SharedSlots> owned_;
  std::atomic<const node::SharedSlots*> slots_ = nullptr;
};

}  // namespace muster::detail::data
