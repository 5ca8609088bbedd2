// A group of ranks that talk to each other: a value over a duplicated MPI communicator.
//
//   const muster::Communicator& world = launch.communicator();
//   auto halves = world.split(world.rank() % 2);      // collective
//   double sum = halves.all_reduce(1.0);              // collective
//
// Every member function marked collective must be called by all ranks of the communicator, in the same order. A
// communicator is driven by one thread at a time; threads that talk at once use duplicates. Copies are cheap and are
// the same communicator. No rank waits where the last copy is destroyed, so it may be destroyed on one rank alone.
//
// No call blocks for good: a wait ends with the result, at the time limit of the launch (Error, ExitCode::retry: who is
// late), by another rank's error (RemoteError), or where ranks are in different calls (ExitCode::user_error).
#pragma once

#include <muster/reduce_op.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace muster {

namespace detail::comm {
class Channel;
}

/// Where the ranks of a communicator are. A node is what shares memory.
struct Topology {
  int local_rank = 0;  ///< among the ranks of this communicator on this node
  int local_size = 1;
  int node_rank = 0;  ///< nodes are numbered by their lowest rank
  int num_nodes = 1;
  std::vector<int> node_of_rank;   ///< [size]
  std::vector<std::string> hosts;  ///< [size], the host's name of each rank
};

/// Memory of one rank that every rank of its node can reach, so that collectives need not copy it. Made by
/// Communicator::shared_memory(); a cheap value, and the memory lives until the last copy of it is gone.
///
/// A child of fork() writes to memory of its own: nothing that it does there reaches its parent or another rank. What
/// it has not written it may see as it was or as it is in the parent.
class SharedMemory {
 public:
  /// Zeroes at first; aligned to a page.
  std::byte* data() const noexcept { return data_.get(); }
  std::size_t size() const noexcept { return size_; }
  template <class T>
  std::span<T> as() const noexcept {
    return {reinterpret_cast<T*>(data()), size_ / sizeof(T)};
  }

 private:
  friend class Communicator;
  SharedMemory(std::shared_ptr<std::byte> data, std::size_t size) noexcept : data_(std::move(data)), size_(size) {}

  std::shared_ptr<std::byte> data_;
  std::size_t size_;
};

/// Made by Launch, or by from_mpi() (muster/mpi.hpp).
class Communicator {
 public:
  /// This process among the ranks, from 0 on.
  int rank() const noexcept;
  int size() const noexcept;
  const Topology& topology() const noexcept;

  /// The same ranks, whose messages never meet those of this one. Collective.
  Communicator duplicate() const;
  /// The ranks that give the same colour, ordered by key, then by rank; an Error (ExitCode::usage) where the colour is
  /// negative. Collective.
  Communicator split(int color, int key = 0) const;

  /// Returns when all ranks have called it. Collective.
  void barrier() const;
  /// The root's value on every rank; an Error (ExitCode::usage) where there is no such rank. Collective.
  std::string broadcast(std::string value, int root = 0) const;
  /// The value of each rank, in the order of ranks. Collective.
  std::vector<std::string> all_gather(const std::string& value) const;
  /// Element by element over the ranks, in place, with the same bits on all of them; all give the same length; an Error
  /// (ExitCode::usage) for operations on bits of floating-point numbers. Collective.
  void all_reduce(std::span<float> values, ReduceOp op = ReduceOp::sum) const;
  void all_reduce(std::span<double> values, ReduceOp op = ReduceOp::sum) const;
  void all_reduce(std::span<std::int64_t> values, ReduceOp op = ReduceOp::sum) const;
  /// The same for one value. Collective.
  double all_reduce(double value, ReduceOp op = ReduceOp::sum) const;
  std::int64_t all_reduce(std::int64_t value, ReduceOp op = ReduceOp::sum) const;

  /// `bytes` of memory, the same number on every rank, in which all_reduce() works without a copy. Where the ranks of a
  /// node cannot share memory it is the rank's own. Collective.
  SharedMemory shared_memory(std::size_t bytes) const;

 private:
  friend class detail::comm::Channel;
  explicit Communicator(std::shared_ptr<detail::comm::Channel> channel);

  std::shared_ptr<detail::comm::Channel> channel_;
};

}  // namespace muster
