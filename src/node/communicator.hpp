// Collectives among the ranks of one node, through memory that all of them map.
//
// It needs memory, a rank and a size, and uses neither MPI nor torch; its ranks may also be threads. It has no lock and
// no thread. An operation is started and then advances inside done() and advance(), as far as it can without waiting.
// Several operations may be in progress; they advance in the order in which they were started, which is the same on all
// ranks.
//
// How data travels in an all-reduce. Every rank has two staging buffers in the shared memory, and counters of its
// phases in separate cache lines. A small message is copied into the buffer, and every rank reduces all buffers for
// itself: one wait. A large message is cut into chunks; each rank reduces one slice of each chunk and the others copy
// it: two waits. If every rank's data are in registered memory (register_region()), a large message is not copied: the
// ranks claim chunks, read them from all, and write the result to all. A rank uses its two buffers in turn, so it may
// be one phase ahead while others still read.
//
// A sum is always formed in the order of ranks, by one rank or identically by all, so every rank gets the same bits, in
// every run and on each of the three paths.
#pragma once

#include "node/dtype.hpp"
#include "node/kernels.hpp"
#include "node/slice.hpp"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

namespace muster::detail::node {

/// Memory of all ranks of a node, `stride` bytes for each.
struct Region {
  std::byte* base = nullptr;
  std::size_t stride = 0;                  ///< bytes per rank, the same for all ranks
  std::shared_ptr<void> memory = nullptr;  ///< owns the memory; kept as long as the region

  /// The address of a rank's part.
  std::byte* of(int rank) const noexcept { return base + static_cast<std::size_t>(rank) * stride; }
};

class Operation;

/// One rank's side of a communicator: the shared memory, the registered regions, and the queue of unfinished
/// operations.
class NodeCommunicator {
 public:
  /// Identifies an operation. Operations finish in the order of their tickets.
  using Ticket = std::uint64_t;
  /// An `open` operation may begin at once. A `closed` one holds up itself and all later ones until this rank opens it.
  enum class Start { open, closed };

  /// Bytes of page-aligned memory that a communicator of that size needs.
  static std::size_t memory_bytes(int size);

  /// `memory`: shared by exactly these `size` ranks, all zeroes before the first rank constructs its NodeCommunicator.
  /// It must outlive the communicator. `names`: [rank], the numbers for error texts, if users know the ranks by other
  /// numbers.
  NodeCommunicator(std::byte* memory, int rank, int size, std::vector<int> names = {});
  ~NodeCommunicator();

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

  /// Registers a region until unregister(). All ranks must register the same regions in the same order, and all must
  /// have mapped a region before any of them uses it. Regions are numbered from 1 on.
  void register_region(Region region) { regions_.emplace(++registered_, std::move(region)); }
  /// The numbers of the regions whose memory nothing on this rank uses any more; empty while operations are in
  /// progress.
  std::set<std::uint64_t> unused_regions() const;
  /// Gives up a region that is unused on all ranks.
  void unregister(std::uint64_t region) { regions_.erase(region); }
  /// True if that memory is in this rank's part of a registered region.
  bool is_registered(const void* data, std::size_t bytes) const noexcept { return region_of(data, bytes) != 0; }

  /// Sets the call number that error texts give for the operations started next.
  void set_call_number(std::uint64_t call) noexcept { call_number_ = call; }

  // These start an operation. All ranks start the same operations in the same order. Data must stay in place until the
  // operation has finished. If another rank is in a different operation, the function that makes progress throws an
  // Error (ExitCode::user_error).
  Ticket barrier();
  Ticket broadcast(void* data, std::size_t bytes, int root);
  /// Reduces in place on every rank.
  Ticket all_reduce(void* data, std::size_t count, const Reduction& reduction);
  /// Reduces in place on the root; the other ranks' data are only read.
  Ticket reduce(void* data, std::size_t count, const Reduction& reduction, int root);
  /// Each of the first `owners` ranks owns a slice of the elements (see slice_of()), which is reduced in place. The
  /// other elements are undefined afterwards; other ranks may still read those in registered memory, so only an
  /// all_gather() of the same data may write to them next.
  Ticket reduce_scatter(void* data, std::size_t count, int owners, const Reduction& reduction);
  /// Copies each owner's slice to all ranks, in place.
  Ticket all_gather(void* data, std::size_t count, int owners, Dtype type, Start start = Start::open);

  /// Opens an operation that was started closed. Makes progress.
  void open(Ticket ticket);
  /// Lets the caller free the operation's data without waiting. The operation goes on with a copy, since the other
  /// ranks still need this rank's part. Registered memory is not copied, and must stay.
  void detach_data(Ticket ticket);
  /// Makes progress with the unfinished operations.
  void advance();
  /// True if all operations have finished.
  bool is_idle() const noexcept { return started_ == finished_; }
  /// True if the operation has finished. Makes progress.
  bool done(Ticket ticket);
  /// Like done(), but makes no progress.
  bool is_finished(Ticket ticket) const noexcept { return finished_ >= ticket; }

 private:
  friend class Operation;
  struct Shared;

  /// The number of the region; 0 if there is none.
  std::uint64_t region_of(const void* data, std::size_t bytes) const noexcept;
  Ticket start(std::unique_ptr<Operation> operation, Start start = Start::open);

  Shared* shared_;
  const int rank_;
  const int size_;
  const std::vector<int> names_;
  const std::size_t staging_bytes_;  ///< size of one buffer
  std::byte* staging_;               ///< [size][2] buffers
  std::map<std::uint64_t, Region> regions_;
  std::uint64_t registered_ = 0;  ///< regions so far
  std::deque<std::unique_ptr<Operation>> queue_;
  std::uint64_t call_number_ = 0;
  Ticket started_ = 0;
  Ticket finished_ = 0;
  std::uint64_t phase_ = 0;          ///< the last phase that an operation has begun
  std::uint64_t seen_arrived_ = 0;   ///< the last phase in which all ranks are known to have arrived
  std::uint64_t seen_finished_ = 0;  ///< the last phase that all ranks are known to have finished
};

}  // namespace muster::detail::node
