// Collectives among the ranks of one node, through memory that all of them map.
//
// The engine takes memory, a rank and a size, and knows neither MPI nor torch: its ranks may as well be threads. There
// is no lock and no thread; an operation is started and then advances inside done(), a piece at a time, never blocking.
// Several may be under way; they advance in the order in which they were started, which is the same on all ranks.
//
// How data travels. Every rank has two slots in the shared memory and flags in cache lines of its own, which count the
// steps that it has done. A small message is copied into the slot, and every rank reduces all slots for itself: one
// wait. A large one is cut into chunks; of each chunk a rank reduces its slice and the others fetch it: two waits.
// Where every rank's data lie in registered memory (see Region) nothing is copied: the ranks claim parts, read them
// from all, and write the result to all. The two slots take turns, so that a rank may be a step ahead while others
// still read.
//
// A sum is always formed in the order of ranks, by one rank or equally by all: the same bits everywhere, in every run,
// on each of the three paths.
#pragma once

#include "muster/reduce_op.hpp"
#include "node/dtype.hpp"
#include "node/kernels.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

namespace muster::detail::node {

/// Memory of all ranks of a team, each rank's part at its rank times `stride` from `base`.
struct Region {
  std::byte* base = nullptr;
  std::size_t stride = 0;  ///< bytes; of all ranks
  std::shared_ptr<void> owner = nullptr;

  std::byte* of(int rank) const noexcept { return base + static_cast<std::size_t>(rank) * stride; }
};

class Team {
 public:
  /// The name of an operation under way. They finish in order.
  using Ticket = std::uint64_t;
  /// Whether an operation may begin at once. One that is closed holds up those behind it until this rank opens it.
  enum class Start { open, closed };

  /// Bytes of memory, aligned to a page, that a team of that size needs.
  static std::size_t memory(int size);

  /// `memory`: the same for all ranks, zeroes before the first rank comes; it outlives the team, and `size` ranks are
  /// the only ones that use it.
  Team(std::byte* memory, int rank, int size);
  ~Team();

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

  /// Makes a region known, under the next number, for as long as the team lives: all ranks add the same regions in the
  /// same order, and must all have mapped it before one of them uses it.
  void add(Region region);
  /// Whether that memory is this rank's part of one of them.
  bool registered(const void* data, std::size_t bytes) const noexcept {
    return region_of(data, bytes) < regions_.size();
  }

  // Started here; all ranks start the same operations in the same order. Data stay where they are until the end.
  Ticket barrier();
  Ticket broadcast(void* data, std::size_t bytes, int root);
  /// In place on every rank.
  Ticket all_reduce(void* data, std::size_t count, const Reduction& reduction);
  /// In place on the root; the data of the others are only read.
  Ticket reduce(void* data, std::size_t count, const Reduction& reduction, int root);
  /// The first `owners` ranks own a slice of the elements each (see slice()). Afterwards the owner's slice is reduced,
  /// in place; what the other elements hold is not defined.
  Ticket reduce_scatter(void* data, std::size_t count, int owners, const Reduction& reduction);
  /// Each owner's slice to all, in place.
  Ticket all_gather(void* data, std::size_t count, int owners, Dtype type, Start start = Start::open);

  /// Lets an operation begin that was started closed. Makes progress.
  void open(Ticket ticket);
  /// Nobody waits for it any more, and its data may go. The other ranks still have this one's part of it.
  void leave(Ticket ticket);
  /// Whether it has finished. Makes progress.
  bool done(Ticket ticket);
  /// The same without making progress.
  bool finished(Ticket ticket) const noexcept { return finished_ >= ticket; }

  /// Elements from `first` on.
  struct Slice {
    std::size_t first = 0;
    std::size_t count = 0;
  };
  /// The slice of an owner: whole cache lines as far as that goes.
  static Slice slice(std::size_t count, int owners, int owner, Dtype type);

 private:
  struct Shared;
  struct Step;
  class Operation;
  class Barrier;
  class Broadcast;
  class AllReduce;
  class Reduce;
  class ReduceScatter;
  class AllGather;

  std::size_t region_of(const void* data, std::size_t bytes) const noexcept;
  Ticket start(std::unique_ptr<Operation> operation, Start start = Start::open);
  void advance();

  // The steps of the operation at the head of the queue.
  std::uint64_t next_step() { return ++step_; }
  void arrive(std::uint64_t step);
  void finish(std::uint64_t step);
  bool all_arrived(std::uint64_t step);
  bool all_finished(std::uint64_t step);
  bool arrived(int rank, std::uint64_t step) const;
  std::byte* slot(int rank, std::uint64_t step) const;
  /// Whether all ranks' data lie in registered memory, and where, in the order of ranks.
  void offer(std::uint64_t step, const void* data, std::size_t bytes);
  bool accept_offers(std::uint64_t step, std::vector<std::byte*>& data) const;
  /// The next part of the step that nobody works on; none when all are claimed.
  std::size_t claim(std::uint64_t step, std::size_t parts);

  Shared* shared_;
  const int rank_;
  const int size_;
  const std::size_t slot_bytes_;
  std::byte* slots_;
  std::vector<Region> regions_;
  std::deque<std::unique_ptr<Operation>> queue_;
  Ticket started_ = 0;
  Ticket finished_ = 0;
  std::uint64_t step_ = 0;
  std::uint64_t seen_arrived_ = 0;   ///< by all
  std::uint64_t seen_finished_ = 0;  ///< by all
};

}  // namespace muster::detail::node
