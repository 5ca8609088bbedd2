// Decoded chunks that a dataset keeps in memory.
#pragma once

#include "hdf5/filter_pipeline.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace muster::detail::data {

/// Keeps the chunks of all columns that were used last, as many as fit the limit. Thread-safe.
class ChunkCache {
 public:
  using Chunk = std::shared_ptr<hdf5::Buffer>;
  /// A column, and the number of a chunk in it.
  using Key = std::pair<const void*, std::int64_t>;

  explicit ChunkCache(std::int64_t limit) : limit_(limit > 0 ? static_cast<std::size_t>(limit) : 0) {}

  /// Lowers the limit by `bytes`, for what the dataset keeps otherwise. The cache must be empty.
  void lower_limit(std::size_t bytes) noexcept { limit_ -= std::min(bytes, limit_); }
  /// True if a chunk of this size may be kept.
  bool fits(std::size_t bytes) const noexcept { return bytes <= limit_; }
  /// The chunk, or null.
  Chunk find(const Key& key);
  /// Keeps a chunk that fits().
  void keep(const Key& key, Chunk chunk, std::size_t bytes);

 private:
  struct Kept {
    Key key;
    Chunk chunk;
    std::size_t bytes;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept;
  };

  std::size_t limit_, used_ = 0;
  std::mutex mutex_;
  std::list<Kept> kept_;  ///< the one that was used last comes first
  std::unordered_map<Key, std::list<Kept>::iterator, Hash> places_;
};

}  // namespace muster::detail::data
