// Decoded chunks that a dataset keeps in memory.
#pragma once

#include "data/sources/chunk_memory.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace muster::detail::data {

/// Keeps the chunks of all columns, as many as fit the limit. Counts how many rows of each chunk were taken, that is
/// read by a pass. Drops first a chunk of which all rows were taken, then the one that was used least recently.
/// Thread-safe.
class ChunkCache {
 public:
  using Chunk = ChunkMemory::Chunk;
  /// A column, and the number of a chunk in it.
  using Key = std::pair<const void*, std::int64_t>;

  explicit ChunkCache(std::int64_t limit) : limit_(limit > 0 ? static_cast<std::size_t>(limit) : 0) {}

  /// Lowers the limit by `bytes`, which the dataset uses for other memory. The cache must be empty.
  void lower_limit(std::size_t bytes) noexcept { limit_ -= std::min(bytes, limit_); }
  /// True if a chunk of this size may be kept.
  bool fits(std::size_t bytes) const noexcept { return bytes <= limit_; }
  /// Memory for a chunk of this size.
  Chunk new_chunk(std::size_t bytes) { return memory_.take(bytes); }
  /// The chunk, or null. Counts `rows` more of its rows as taken.
  Chunk find(const Key& key, std::int64_t rows);
  /// Keeps a chunk that fits(), unless the cache has it. The chunk has `rows` rows, of which `taken` are taken now.
  void keep(const Key& key, Chunk chunk, std::size_t bytes, std::int64_t rows, std::int64_t taken);
  /// Drops the chunk if all of its rows were taken.
  void drop_taken(const Key& key);
  /// True if a chunk of this size can be kept without dropping another one.
  bool has_room(std::size_t bytes);
  struct Kept {
    Key key;
    Chunk chunk;
    std::size_t bytes;
    std::int64_t rows, taken;
  };
  /// Empties the cache.
  std::list<Kept> take_all();

 private:
  using List = std::list<Kept>;
  /// Counts the rows, and moves the chunk to the begin or the end of the list.
  void take(List::iterator kept, std::int64_t rows);

  struct Hash {
    std::size_t operator()(const Key& key) const noexcept;
  };

  std::size_t limit_, used_ = 0;
  ChunkMemory memory_;
  std::mutex mutex_;
  List kept_;  ///< the last one is dropped next
  std::unordered_map<Key, List::iterator, Hash> places_;
};

}  // namespace muster::detail::data
