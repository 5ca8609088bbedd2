// What the operations of a communicator have in common: how they go from phase to phase, cut data into chunks, and
// agree that nothing has to be copied.
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

/// The beginning of the shared memory; zeroes are its valid first state.
struct Communicator::Shared {
  /// Where a rank's data lie: the number of the region from 1, 0 for none, and the offset in the rank's memory there.
  struct Place {
    std::uint64_t region = 0;
    std::uint64_t offset = 0;
  };
  struct Rank {
    alignas(cache_line) std::atomic<std::uint64_t> arrived;
    /// Of the phase that it is in and of the last: in the same line, so that who reads the one has the other.
    struct {
      std::atomic<std::uint64_t> word;    ///< of the call
      std::atomic<std::uint64_t> number;  ///< of the call, as the communicator's owner counts
    } calls[2];
    alignas(cache_line) std::atomic<std::uint64_t> finished;
    alignas(cache_line) Place places[2];
  };
  alignas(cache_line) Claims claims;
  Rank ranks[1];  // [size]

  static std::size_t bytes(int size) {
    return whole_pages(sizeof(Shared) + sizeof(Rank) * static_cast<std::size_t>(size - 1));
  }
};

/// In a phase a rank writes to its buffer, says that it has arrived, and reads what the others have written when they
/// have arrived too. Nobody need wait at the end of a phase: a rank arrives in one when everybody has left the one
/// before the last, whose buffer it takes over.
class Operation {
  Communicator& ranks_;

 public:
  virtual ~Operation() = default;
  /// Goes on as far as that is possible without waiting; true at the end.
  virtual bool advance() = 0;
  /// Goes on in memory of its own. Registered memory stays, as other ranks may write there.
  void leave_data();

  Communicator::Start start = Communicator::Start::open;
  std::uint64_t number = 0;  ///< of the call; see Communicator::number()

 protected:
  Operation(Communicator& ranks, void* data, const Call& call)
      : ranks_(ranks), count_(call.count), type_(call.type), call_(call.word()), data_(static_cast<std::byte*>(data)) {}

  std::byte* at(std::size_t element) const { return data_ + element * element_; }
  std::size_t bytes() const { return count_ * element_; }

  // The phase that this operation is in.
  /// Writes and arrives, once; false as long as it may not.
  template <class Write>
  bool arrive(Write&& write) {
    if (arrived_) return true;
    if (phase_ == 0) phase_ = ++ranks_.phase_;
    if (!all_arrived(phase_ - 1)) return false;
    write();
    auto& said = mine().calls[phase_ & 1];
    said.word.store(call_, std::memory_order_relaxed);
    said.number.store(number, std::memory_order_relaxed);
    mine().arrived.store(phase_, std::memory_order_release);
    return arrived_ = true;
  }
  bool arrived(int rank) const { return arrived(rank, phase_); }
  bool all_arrived() { return all_arrived(phase_); }
  /// For what others fetch or wait for after they have arrived.
  void finish() { mine().finished.store(phase_, std::memory_order_release); }
  bool all_finished();
  /// The buffer of a rank.
  std::byte* staging(int rank) const {
    return ranks_.staging_ + (2 * static_cast<std::size_t>(rank) + (phase_ & 1)) * staging_bytes_;
  }
  template <class May>
  std::optional<std::size_t> claim(May&& may) {
    return ranks_.shared_->claims.claim(phase_, may);
  }

  /// Goes through `count` elements in chunks, each a phase: write(first, n) before this rank arrives, then read(first,
  /// n), which is false as long as it must wait. True at the end.
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

  /// Whether the ranks have told each other where their data lie; then everywhere_ says it.
  bool agreed();

  /// Reduces what lies at source(rank) to all targets.
  template <class Source>
  void reduce_to(std::span<void* const> targets, std::size_t count, const Reduction& reduction, Source&& source) {
    sources_.resize(static_cast<std::size_t>(size_));
    for (int r = 0; r < size_; ++r) sources_[static_cast<std::size_t>(r)] = source(r);
    reduce_arrays(targets, sources_, count, reduction);
  }
  /// The same to this rank's own elements.
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
  /// [size], in the order of ranks; empty where any rank's data do not lie in registered memory, and must be copied.
  std::vector<std::byte*> everywhere_;

 private:
  Communicator::Shared::Rank& mine() const { return ranks_.shared_->ranks[rank_]; }
  /// An Error where that rank is in another call than this one: a phase is one of the same call on all ranks.
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
  std::unique_ptr<std::byte[]> own_;
  std::vector<const void*> sources_;  // [size]
  std::uint64_t phase_ = 0;           ///< 0 before it has begun
  bool arrived_ = false;
  bool agreed_ = false;
  std::size_t first_ = 0;  ///< element of the chunk
};

}  // namespace muster::detail::node
