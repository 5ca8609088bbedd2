#include "node/block_reduction.hpp"

#include "node/sizes.hpp"

#include "node/kernels.hpp"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <utility>

namespace muster::detail::node {
namespace {}  // namespace

/// The beginning of the shared memory; zeroes are its valid first state. Words hold the round in the upper half and a
/// number in the lower, so that nothing has to be reset.
struct BlockReduction::Shared {
  struct Rank {
    alignas(line) std::atomic<std::uint64_t> published;
    alignas(line) std::atomic<std::uint64_t> finished;
  };
  alignas(line) std::atomic<std::uint64_t> claimed;
  Rank ranks[1];  // [size], and behind them the words of each rank: [size][2][blocks + notes]

  static std::size_t bytes(int size) { return sizeof(Shared) + sizeof(Rank) * static_cast<std::size_t>(size - 1); }
};

std::size_t BlockReduction::memory(int size, std::size_t blocks, std::size_t notes) {
  const auto words = 2 * (blocks + notes) * static_cast<std::size_t>(size);
  return (Shared::bytes(size) + words * sizeof(std::uint64_t) + page - 1) / page * page;
}

BlockReduction::BlockReduction(std::byte* memory, Region region, int rank, int size, std::vector<Block> blocks,
                               std::size_t notes)
    : shared_(reinterpret_cast<Shared*>(memory)),
      region_(std::move(region)),
      rank_(rank),
      size_(size),
      blocks_(std::move(blocks)),
      notes_(notes),
      order_(blocks_.size()),
      position_(blocks_.size()) {
  own_.data.resize(static_cast<std::size_t>(size));
  helper_.data.resize(static_cast<std::size_t>(size));
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  std::iota(position_.begin(), position_.end(), std::size_t{0});
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    const auto step = part_bytes / size_of(blocks_[b].type);
    for (std::size_t first = 0; first < blocks_[b].count; first += step)
      parts_.push_back({parts_.size(), b, first, std::min(step, blocks_[b].count - first)});
  }
}

void BlockReduction::reorder(const std::vector<std::size_t>& order) {
  order_ = order;
  for (std::size_t i = 0; i < order_.size(); ++i) position_[order_[i]] = i;
  std::sort(parts_.begin(), parts_.end(), [&](const Part& a, const Part& b) {
    return std::pair(position_[a.block], a.first) < std::pair(position_[b.block], b.first);
  });
}

std::uint64_t* BlockReduction::words(int rank) const {
  auto* first = reinterpret_cast<std::uint64_t*>(reinterpret_cast<std::byte*>(shared_) + Shared::bytes(size_));
  return first + (2 * static_cast<std::size_t>(rank) + (round_ & 1)) * (blocks_.size() + notes_);
}

void BlockReduction::begin() {
  ++round_;
  mine_ = own_.ready = helper_.ready = 0;
  finished_ = false;
}

void BlockReduction::publish(const void* data) {
  words(rank_)[order_[mine_]] = static_cast<std::uint64_t>(static_cast<const std::byte*>(data) - region_.of(rank_));
  ++mine_;
  shared_->ranks[rank_].published.store(round_ << 32 | mine_, std::memory_order_release);
}

void BlockReduction::write_note(std::size_t index, std::uint32_t note) { words(rank_)[blocks_.size() + index] = note; }

std::size_t BlockReduction::published() const {
  std::size_t all = blocks_.size();
  for (int r = 0; r < size_; ++r) {
    const auto word = shared_->ranks[r].published.load(std::memory_order_acquire);
    // A rank that is a round ahead has published everything of this one.
    const auto theirs = word >> 32;
    if (theirs < (round_ & 0xffffffff)) return 0;
    if (theirs == (round_ & 0xffffffff)) all = std::min<std::size_t>(all, word & 0xffffffff);
  }
  return all;
}

BlockReduction::Next BlockReduction::work_on_next(Worker& worker, const Work& work) const {
  const auto name = round_ << 32;
  auto now = shared_->claimed.load(std::memory_order_relaxed);
  for (;;) {
    const auto next = (now & ~std::uint64_t{0xffffffff}) == name ? now & 0xffffffff : 0;
    if (next >= parts_.size()) return Next::none_left;
    const auto& part = parts_[next];
    if (position_[part.block] >= worker.ready) {
      worker.ready = published();
      if (position_[part.block] >= worker.ready) return Next::not_ready;
    }
    if (!shared_->claimed.compare_exchange_weak(now, name | (next + 1), std::memory_order_relaxed)) continue;
    const auto at = part.first * size_of(blocks_[part.block].type);
    for (int r = 0; r < size_; ++r)
      worker.data[static_cast<std::size_t>(r)] = region_.of(r) + words(r)[part.block] + at;
    work(part, worker.data);
    return Next::done;
  }
}

bool BlockReduction::advance(const Work& work) {
  if (!finished_) {
    if (work_on_next(own_, work) != Next::none_left || mine_ < blocks_.size()) return false;
    finished_ = true;
    shared_->ranks[rank_].finished.store(round_, std::memory_order_release);
  }
  for (int r = 0; r < size_; ++r)
    if (shared_->ranks[r].finished.load(std::memory_order_acquire) < round_) return false;
  return true;
}

std::uint32_t BlockReduction::note(int rank, std::size_t index) const {
  return static_cast<std::uint32_t>(words(rank)[blocks_.size() + index]);
}

BlockReduction::Work in_place_sum(std::vector<BlockReduction::Block> blocks, double scale) {
  return [blocks = std::move(blocks), scale, targets = std::vector<void*>(), sources = std::vector<const void*>()](
             const BlockReduction::Part& part, std::span<std::byte* const> data) mutable {
    targets.assign(data.begin(), data.end());
    sources.assign(data.begin(), data.end());
    reduce_arrays(targets, sources, part.count, {.type = blocks[part.block].type, .scale = scale});
  };
}

}  // namespace muster::detail::node
