// The communicator of the ranks of one node: collectives through memory that all of them map.
//
// It takes memory, a rank and a size, and knows neither MPI nor torch: its ranks may as well be threads. There is no
// lock and no thread; an operation is started and then advances inside done(), a chunk at a time, never blocking.
// Several may be under way; they advance in the order in which they were started, which is the same on all ranks.
//
// How data travels. Every rank has two staging buffers in the shared memory and flags in cache lines of its own, which
// count the phases that it has gone through. A small message is copied into the buffer, and every rank reduces all
// buffers for itself: one wait. A large one is cut into chunks; of each chunk a rank reduces its slice and the others
// fetch it: two waits. Where every rank's data lie in registered memory (see Region) nothing is copied: the ranks claim
// chunks, read them from all, and write the result to all. The two buffers take turns, so that a rank may be a phase
// ahead while others still read.
//
// A sum is always formed in the order of ranks, by one rank or equally by all: the same bits everywhere, in every run,
// on each of the three paths.
#pragma once

#include "node/dtype.hpp"
#include "node/kernels.hpp"
#include "node/slice.hpp"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

namespace muster::detail::node {

/// Memory of all ranks of a node; that of a rank begins at its rank times `stride` from `base`.
struct Region {
  std::byte* base = nullptr;
  std::size_t stride = 0;                  ///< bytes; of all ranks
  std::shared_ptr<void> memory = nullptr;  ///< kept as long as the region

  std::byte* of(int rank) const noexcept { return base + static_cast<std::size_t>(rank) * stride; }
};

class Operation;

class Communicator {
 public:
  /// The name of an operation under way. They finish in order.
  using Ticket = std::uint64_t;
  /// Whether an operation may begin at once. One that is closed holds up those behind it until this rank opens it.
  enum class Start { open, closed };

  /// Bytes of memory, aligned to a page, that a communicator of that size needs.
  static std::size_t memory(int size);

  /// `memory`: the same for all ranks, zeroes before the first rank comes; it outlives the communicator, and `size`
  /// ranks are the only ones that use it. `names`: of the ranks in errors, where they are known by other numbers.
  Communicator(std::byte* memory, int rank, int size, std::vector<int> names = {});
  ~Communicator();

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

  /// Makes a region known, under the next number, for as long as the communicator lives: all ranks register the same
  /// regions in the same order, and must all have mapped it before one of them uses it.
  void add(Region region) { regions_.push_back(std::move(region)); }
  /// Whether that memory is this rank's of one of them.
  bool registered(const void* data, std::size_t bytes) const noexcept {
    return region_of(data, bytes) < regions_.size();
  }

  /// Of the call whose operations are started next, in errors.
  void number(std::uint64_t call) noexcept { number_ = call; }

  // Started here; all ranks start the same operations in the same order. Data stay where they are until the end. Where
  // another rank is seen in another operation, what makes progress throws an Error (ExitCode::user_error).
  Ticket barrier();
  Ticket broadcast(void* data, std::size_t bytes, int root);
  /// In place on every rank.
  Ticket all_reduce(void* data, std::size_t count, const Reduction& reduction);
  /// In place on the root; the data of the others are only read.
  Ticket reduce(void* data, std::size_t count, const Reduction& reduction, int root);
  /// The first `owners` ranks own a slice of the elements each (see slice_of()). Afterwards the owner's slice is
  /// reduced, in place; what the other elements hold is not defined.
  Ticket reduce_scatter(void* data, std::size_t count, int owners, const Reduction& reduction);
  /// Each owner's slice to all, in place.
  Ticket all_gather(void* data, std::size_t count, int owners, Dtype type, Start start = Start::open);

  /// Lets an operation begin that was started closed. Makes progress.
  void open(Ticket ticket);
  /// Nobody waits for it any more, and its data may go. The other ranks still have this one's part of it.
  void leave(Ticket ticket);
  /// Makes progress with what is under way.
  void advance();
  /// Whether nothing is.
  bool idle() const noexcept { return started_ == finished_; }
  /// Whether it has finished. Makes progress.
  bool done(Ticket ticket);
  /// The same without making progress.
  bool finished(Ticket ticket) const noexcept { return finished_ >= ticket; }

 private:
  friend class Operation;
  struct Shared;

  std::size_t region_of(const void* data, std::size_t bytes) const noexcept;
  Ticket start(std::unique_ptr<Operation> operation, Start start = Start::open);

  Shared* shared_;
  const int rank_;
  const int size_;
  const std::vector<int> names_;
  const std::size_t staging_bytes_;  ///< of one buffer
  std::byte* staging_;               ///< [size][2] buffers
  std::vector<Region> regions_;
  std::deque<std::unique_ptr<Operation>> queue_;
  std::uint64_t number_ = 0;
  Ticket started_ = 0;
  Ticket finished_ = 0;
  std::uint64_t phase_ = 0;          ///< the last that an operation has begun
  std::uint64_t seen_arrived_ = 0;   ///< by all
  std::uint64_t seen_finished_ = 0;  ///< by all
};

}  // namespace muster::detail::node
