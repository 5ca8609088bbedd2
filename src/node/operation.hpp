// The base class of a communicator's operations: it goes from phase to phase, cuts data into chunks, and finds out
// whether data have to be copied.
#pragma once

#include "node/call.hpp"
#include "node/communicator.hpp"
#include "node/slice.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace muster::detail::node {

/// The beginning of the shared memory. All-zero memory is a valid initial state.
struct NodeCommunicator::Shared {
  /// The location of a rank's data: the number of the region, from 1, or 0 for none; and the offset in bytes in the
  /// rank's part of it.
  struct DataLocation {
    std::uint64_t region = 0;
    std::uint64_t offset = 0;
  };
  struct Rank {
    alignas(cache_line) std::atomic<std::uint64_t> arrived;
    /// The calls of the rank's present and previous phase, [phase % 2]. They share the cache line of `arrived`, so that
    /// reading both costs one cache miss.
    struct {
      std::atomic<std::uint64_t> word;         ///< Call::encode() of the call
      std::atomic<std::uint64_t> call_number;  ///< see NodeCommunicator::set_call_number()
    } calls[2];
    alignas(cache_line) std::atomic<std::uint64_t> finished;
    alignas(cache_line) DataLocation locations[2];
  };
  alignas(cache_line) ChunkCounter claims;
  Rank ranks[1];  // [size]

  static std::size_t bytes(int size) {
    return whole_pages(sizeof(Shared) + sizeof(Rank) * static_cast<std::size_t>(size - 1));
  }
};

/// The base class of one operation on one rank: its call, its data, and the phase that it is in. In each phase a rank
/// writes to its buffer, marks itself as arrived, and reads the others' buffers once they have arrived too. No rank
/// waits at the end of a phase. Instead it arrives in a phase only after all ranks have arrived in the previous one, so
/// that they have left the phase before that, whose buffer it reuses.
class Operation {
  NodeCommunicator& ranks_;

 public:
  virtual ~Operation() = default;
  /// Goes on as far as possible without waiting; true if the operation has finished.
  virtual bool advance() = 0;
  /// Copies the data, so that the caller may free them. Registered memory is not copied, since other ranks may write to
  /// it.
  void copy_data();

  NodeCommunicator::Start start = NodeCommunicator::Start::open;
  std::uint64_t call_number = 0;  ///< see NodeCommunicator::set_call_number()

 protected:
  Operation(NodeCommunicator& ranks, void* data, const Call& call)
      : ranks_(ranks),
        count_(call.count),
        type_(call.type),
        call_(call.encode()),
        data_(static_cast<std::byte*>(data)) {}

  std::byte* at(std::size_t element) const { return data_ + element * element_; }
  std::size_t bytes() const { return count_ * element_; }

  // These functions work on the operation's current phase.
  /// Calls write() and marks this rank as arrived, once per phase. False if that is not possible yet.
  template <class Write>
  bool arrive(Write&& write) {
    if (arrived_) return true;
    if (phase_ == 0) phase_ = ++ranks_.phase_;
    if (!all_arrived(phase_ - 1)) return false;
    write();
    auto& own_call = mine().calls[phase_ & 1];
    own_call.word.store(call_, std::memory_order_relaxed);
    own_call.call_number.store(call_number, std::memory_order_relaxed);
    mine().arrived.store(phase_, std::memory_order_release);
    return arrived_ = true;
  }
  bool arrived(int rank) const { return arrived(rank, phase_); }
  bool all_arrived() { return all_arrived(phase_); }
  /// Marks this rank's work in the phase as finished; other ranks read this in all_finished().
  void finish() { mine().finished.store(phase_, std::memory_order_release); }
  bool all_finished();
  /// The buffer of a rank in this phase.
  std::byte* staging(int rank) const {
    return ranks_.staging_ + (2 * static_cast<std::size_t>(rank) + (phase_ & 1)) * staging_bytes_;
  }
  template <class May>
  std::optional<std::size_t> claim(May&& may) {
    return ranks_.shared_->claims.claim(phase_, may);
  }

  /// Goes through `count` elements in chunks of up to `most`, a phase for each. Calls write(first, n) before this rank
  /// arrives, then read(first, n) until it returns true. True if all chunks are done.
  template <class Write, class Read>
  bool each_chunk(std::size_t count, std::size_t most, Write&& write, Read&& read) {
    while (first_ < count) {
      const auto n = std::min(count - first_, most);
      if (!arrive([&] { write(first_, n); }) || !read(first_, n)) return false;
      first_ += n;
      next_phase();
    }
    return true;
  }

  /// Exchanges the locations of all ranks' data and sets rank_data_. False if not all ranks have arrived yet.
  bool exchange_locations();

  /// Reduces the arrays at source(rank) of all ranks and writes the result to all targets.
  template <class Source>
  void reduce_to(std::span<void* const> targets, std::size_t count, const Reduction& reduction, Source&& source) {
    sources_.resize(static_cast<std::size_t>(size_));
    for (int r = 0; r < size_; ++r) sources_[static_cast<std::size_t>(r)] = source(r);
    reduce_arrays(targets, sources_, count, reduction);
  }
  /// Like reduce_to(), but the target is this rank's elements of `slice`.
  template <class Source>
  void reduce_here(const Slice& slice, const Reduction& reduction, Source&& source) {
    void* const here = at(slice.first);
    reduce_to(std::span(&here, 1), slice.count, reduction, source);
  }

  const std::size_t count_;
  const Dtype type_;
  const std::uint64_t call_;
  const std::size_t element_ = size_of(type_);  ///< bytes
  const int rank_ = ranks_.rank();
  const int size_ = ranks_.size();
  const std::size_t staging_bytes_ = ranks_.staging_bytes_;
  /// [size]: the address of each rank's data; empty if the data of any rank are not in registered memory and so must be
  /// copied.
  std::vector<std::byte*> rank_data_;

 private:
  NodeCommunicator::Shared::Rank& mine() const { return ranks_.shared_->ranks[rank_]; }
  /// True if that rank has arrived. Throws an Error if it is in a different call in that phase.
  bool arrived(int rank, std::uint64_t phase) const {
    const auto& theirs = ranks_.shared_->ranks[rank];
    if (theirs.arrived.load(std::memory_order_acquire) < phase) return false;
    if (theirs.calls[phase & 1].word.load(std::memory_order_relaxed) !=
        mine().calls[phase & 1].word.load(std::memory_order_relaxed))
      mismatched(rank, phase);
    return true;
  }
  [[noreturn]] void mismatched(int rank, std::uint64_t phase) const;
  bool all_arrived(std::uint64_t phase);
  void next_phase() {
    phase_ = 0;
    arrived_ = false;
  }

  std::byte* data_;
  std::unique_ptr<std::byte[]> copy_;  ///< made by copy_data()
  std::vector<const void*> sources_;   // [size]
  std::uint64_t phase_ = 0;            ///< 0 before the phase has begun
  bool arrived_ = false;
  bool has_locations_ = false;
  std::size_t first_ = 0;  ///< index of the chunk's first element
};

}  // namespace muster::detail::node
