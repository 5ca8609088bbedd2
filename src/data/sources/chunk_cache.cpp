#include "data/sources/chunk_cache.hpp"

#include "data/sources/permutation.hpp"

#include <utility>
#include <vector>

namespace muster::detail::data {

std::size_t ChunkCache::Hash::operator()(const Key& key) const noexcept {
  return mix(reinterpret_cast<std::uintptr_t>(key.first), static_cast<std::uint64_t>(key.second));
}

void ChunkCache::take(List::iterator kept, std::int64_t rows) {
  kept->taken += rows;
  const bool is_done = kept->taken >= kept->rows;
  if (is_done) kept->taken = 0;  // the next pass begins
  kept_.splice(is_done ? kept_.end() : kept_.begin(), kept_, kept);
}

ChunkCache::Chunk ChunkCache::find(const Key& key, std::int64_t rows) {
  const std::lock_guard lock(mutex_);
  const auto found = places_.find(key);
  if (found == places_.end()) return {};
  take(found->second, rows);
  return found->second->chunk;
}

void ChunkCache::keep(const Key& key, Chunk chunk, std::size_t bytes, std::int64_t rows, std::int64_t taken) {
  std::vector<Chunk> dropped;  // freed without the lock
  const std::lock_guard lock(mutex_);
  if (places_.contains(key)) return;  // another thread was first
  while (used_ + bytes > limit_) {
    auto& last = kept_.back();
    dropped.push_back(std::move(last.chunk));
    used_ -= last.bytes;
    places_.erase(last.key);
    kept_.pop_back();
  }
  kept_.push_front({key, std::move(chunk), bytes, rows, 0});
  places_.emplace(key, kept_.begin());
  used_ += bytes;
  take(kept_.begin(), taken);
}

void ChunkCache::drop_taken(const Key& key) {
  Chunk dropped;  // freed without the lock
  const std::lock_guard lock(mutex_);
  const auto found = places_.find(key);
  if (found == places_.end() || found->second->taken > 0) return;
  dropped = std::move(found->second->chunk);
  used_ -= found->second->bytes;
  kept_.erase(found->second);
  places_.erase(found);
}

bool ChunkCache::has_room(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  return used_ + bytes <= limit_;
}

std::list<ChunkCache::Kept> ChunkCache::take_all() {
  const std::lock_guard lock(mutex_);
  used_ = 0;
  places_.clear();
  return std::exchange(kept_, {});
}

}  // namespace muster::detail::data
