#include "node/bucket_reduction.hpp"

#include "node/kernels.hpp"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <utility>

namespace muster::detail::node {
namespace {

constexpr std::uint64_t nothing = ~std::uint64_t{0};  ///< announced in place of an offset

}  // namespace

/// The beginning of the shared memory. All-zero memory is a valid initial state.
struct BucketReduction::Shared {
  struct Rank {
    /// The round in the upper half and the number of announced buckets in the lower half, so that nothing must be reset
    /// for a new round.
    alignas(cache_line) std::atomic<std::uint64_t> announced;
    alignas(cache_line) std::atomic<std::uint64_t> finished;  ///< the last round that the rank has finished
  };
  alignas(cache_line) ChunkCounter claims;
  Rank ranks[1];  // [size], followed by the memory of written(): [size][2][buckets + words]

  static std::size_t bytes(int size) { return sizeof(Shared) + sizeof(Rank) * static_cast<std::size_t>(size - 1); }
};

std::size_t BucketReduction::memory_bytes(int size, std::size_t buckets, std::size_t words) {
  return whole_pages(Shared::bytes(size) +
                     2 * (buckets + words) * static_cast<std::size_t>(size) * sizeof(std::uint64_t));
}

BucketReduction::BucketReduction(std::byte* memory, Region region, int rank, int size, std::vector<Bucket> buckets,
                                 std::size_t words, Chunking chunking)
    : shared_(reinterpret_cast<Shared*>(memory)),
      region_(std::move(region)),
      rank_(rank),
      size_(size),
      buckets_(std::move(buckets)),
      words_(words),
      owners_(chunking.owners),
      order_(buckets_.size()),
      position_(buckets_.size()) {
  seen_by_rank_.data.resize(static_cast<std::size_t>(size));
  seen_by_thread_.data.resize(static_cast<std::size_t>(size));
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  std::iota(position_.begin(), position_.end(), std::size_t{0});
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const auto most = chunking.bytes / size_of(buckets_[b].type);
    for (std::size_t first = 0; first < buckets_[b].count; first += most)
      chunks_.push_back({chunks_.size(), b, first, std::min(most, buckets_[b].count - first)});
  }
}

void BucketReduction::reorder(const std::vector<std::size_t>& order) {
  order_ = order;
  for (std::size_t i = 0; i < order_.size(); ++i) position_[order_[i]] = i;
  std::sort(chunks_.begin(), chunks_.end(), [&](const Chunk& a, const Chunk& b) {
    return std::pair(position_[a.bucket], a.first) < std::pair(position_[b.bucket], b.first);
  });
}

std::vector<BucketReduction::Chunk> BucketReduction::own_chunks() const {
  std::vector<Chunk> own;
  for (auto i = static_cast<std::size_t>(rank_); rank_ < owners_ && i < chunks_.size();
       i += static_cast<std::size_t>(owners_))
    own.push_back(chunks_[i]);
  return own;
}

std::uint64_t* BucketReduction::written(int rank) const {
  auto* first = reinterpret_cast<std::uint64_t*>(reinterpret_cast<std::byte*>(shared_) + Shared::bytes(size_));
  return first + (2 * static_cast<std::size_t>(rank) + (round_ & 1)) * (buckets_.size() + words_);
}

void BucketReduction::begin() {
  ++round_;
  own_announced_ = seen_by_rank_.ready = seen_by_thread_.ready = 0;
  own_chunk_ = rank_ < owners_ ? static_cast<std::size_t>(rank_) : chunks_.size();
  finished_ = over_ = false;
}

void BucketReduction::announce(const void* data) {
  written(rank_)[order_[own_announced_]] =
      data == nullptr ? nothing : static_cast<std::uint64_t>(static_cast<const std::byte*>(data) - region_.of(rank_));
  ++own_announced_;
  shared_->ranks[rank_].announced.store(round_ << 32 | own_announced_, std::memory_order_release);
}

void BucketReduction::write_word(std::size_t index, std::uint32_t word) {
  written(rank_)[buckets_.size() + index] = word;
}

std::size_t BucketReduction::announced() const {
  std::size_t all = buckets_.size();
  for (int r = 0; r < size_; ++r) {
    const auto word = shared_->ranks[r].announced.load(std::memory_order_acquire);
    // A rank that is a round ahead has announced all buckets of this round.
    const auto theirs = word >> 32;
    if (theirs < (round_ & 0xffffffff)) return 0;
    if (theirs == (round_ & 0xffffffff)) all = std::min<std::size_t>(all, word & 0xffffffff);
  }
  return all;
}

BucketReduction::Next BucketReduction::next_chunk(Seen& seen, const OnChunk& on_chunk) const {
  auto next = Next::done;
  const auto number = shared_->claims.claim(round_, [&](std::size_t i) {
    if (i >= chunks_.size()) {
      next = Next::none_left;
    } else if (position_[chunks_[i].bucket] >= seen.ready) {
      seen.ready = announced();
      next = position_[chunks_[i].bucket] >= seen.ready ? Next::not_ready : Next::done;
    }
    return next == Next::done;
  });
  if (number) process(seen, chunks_[*number], on_chunk);
  return next;
}

void BucketReduction::process(Seen& seen, const Chunk& chunk, const OnChunk& on_chunk) const {
  const auto at = chunk.first * size_of(buckets_[chunk.bucket].type);
  for (int r = 0; r < size_; ++r) {
    const auto offset = written(r)[chunk.bucket];
    seen.data[static_cast<std::size_t>(r)] = offset == nothing ? nullptr : region_.of(r) + offset + at;
  }
  if (owners_ > 0 || std::ranges::find(seen.data, nullptr) == seen.data.end()) on_chunk(chunk, seen.data);
}

bool BucketReduction::next_own(const OnChunk& body) {
  if (gave_all()) return false;
  const auto& chunk = chunks_[own_chunk_];
  if (position_[chunk.bucket] >= seen_by_rank_.ready) {
    seen_by_rank_.ready = announced();
    if (position_[chunk.bucket] >= seen_by_rank_.ready) return false;
  }
  process(seen_by_rank_, chunk, body);
  own_chunk_ += static_cast<std::size_t>(owners_);  // not if body() throws
  return true;
}

bool BucketReduction::advance(const OnChunk& on_chunk) {
  if (!finished_ && next_chunk(seen_by_rank_, on_chunk) != Next::none_left) return false;
  return finish();
}

bool BucketReduction::finish() {
  if (!announced_all()) return false;
  if (!std::exchange(finished_, true)) shared_->ranks[rank_].finished.store(round_, std::memory_order_release);
  for (int r = 0; r < size_; ++r)
    if (shared_->ranks[r].finished.load(std::memory_order_acquire) < round_) return false;
  return over_ = true;
}

std::uint32_t BucketReduction::word(int rank, std::size_t index) const {
  return static_cast<std::uint32_t>(written(rank)[buckets_.size() + index]);
}

BucketReduction::OnChunk in_place_sum(std::vector<BucketReduction::Bucket> buckets, double scale) {
  return [buckets = std::move(buckets), scale, targets = std::vector<void*>(), sources = std::vector<const void*>()](
             const BucketReduction::Chunk& chunk, std::span<std::byte* const> data) mutable {
    targets.assign(data.begin(), data.end());
    sources.assign(data.begin(), data.end());
    reduce_arrays(targets, sources, chunk.count, {.type = buckets[chunk.bucket].type, .scale = scale});
  };
}

}  // namespace muster::detail::node
