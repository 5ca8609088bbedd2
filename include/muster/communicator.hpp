// A group of ranks that communicate: a value type over a duplicated MPI communicator.
//
//   const muster::Communicator& world = launch.communicator();
//   auto halves = world.split(world.rank() % 2);      // collective
//   double sum = halves.all_reduce(1.0);              // collective
//
// All ranks of the communicator must call the member functions that are marked collective, in the same order. Only one
// thread at a time may use a communicator; threads that communicate at the same time use duplicates. Copies are cheap
// and refer to the same communicator. Destroying the last copy is not collective: it may happen on one rank only.
//
// No call blocks forever: a wait ends with the result, at the launch's timeout (Error, ExitCode::retry, which names
// the late ranks), with another rank's error (RemoteError), or if ranks are in different calls (ExitCode::user_error).
#pragma once

#include <muster/detail/export.hpp>
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

/// The placement of a communicator's ranks on nodes. A node is a set of ranks that share memory.
struct Topology {
  int local_rank = 0;  ///< this rank's number among the communicator's ranks on its node
  int local_size = 1;  ///< how many of the communicator's ranks are on this rank's node
  int node_rank = 0;   ///< the number of this rank's node; nodes are numbered in the order of their lowest ranks
  int num_nodes = 1;
  std::vector<int> node_of_rank;   ///< [size], the number of each rank's node
  std::vector<std::string> hosts;  ///< [size], the name of each rank's host
};

/// Memory of one rank that every rank of its node can access, so that collectives need not copy the data in it. Made by
/// Communicator::shared_memory(). Cheap to copy; the memory lives until the last copy is gone. When no rank has a copy,
/// the next call of shared_memory() on that communicator unmaps the memory's addresses and closes its file descriptor.
///
/// A child of fork() writes to its own copy: its writes reach neither its parent nor another rank. Where it has not
/// written, it may see the values at the time of the fork or the parent's present values.
class SharedMemory {
 public:
  /// Initially zero; aligned to a page.
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

/// Ranks that communicate, as the head of this file says. Made by Launch, Session or from_mpi() (muster/mpi.hpp).
class MUSTER_API Communicator {
 public:
  /// This process's rank, from 0 on.
  int rank() const noexcept;
  int size() const noexcept;
  const Topology& topology() const noexcept;

  /// A new communicator of the same ranks; messages of the two do not mix. Collective.
  Communicator duplicate() const;
  /// A new communicator of the ranks that give the same color, ordered by key, then by rank. An Error (ExitCode::usage)
  /// if the color is negative. Collective.
  Communicator split(int color, int key = 0) const;

  /// Returns when all ranks have called it. Collective.
  void barrier() const;
  /// Returns the root's value on every rank. An Error (ExitCode::usage) if there is no rank `root`. Collective.
  std::string broadcast(std::string value, int root = 0) const;
  /// Returns the values of all ranks, in the order of ranks. Collective.
  std::vector<std::string> all_gather(const std::string& value) const;
  /// Reduces element by element over the ranks, in place; the result has the same bits on all ranks. All ranks must
  /// give the same length. An Error (ExitCode::usage) for bit operations on floating-point numbers. Collective.
  void all_reduce(std::span<float> values, ReduceOp op = ReduceOp::sum) const;
  void all_reduce(std::span<double> values, ReduceOp op = ReduceOp::sum) const;
  void all_reduce(std::span<std::int64_t> values, ReduceOp op = ReduceOp::sum) const;
  /// Returns the reduction of one value of each rank. Collective.
  double all_reduce(double value, ReduceOp op = ReduceOp::sum) const;
  std::int64_t all_reduce(std::int64_t value, ReduceOp op = ReduceOp::sum) const;

  /// Allocates `bytes` of memory, the same number on every rank. The ranks of a node reduce data in it without copying
  /// the data first. If they cannot share memory, it is this rank's private memory. Collective.
  SharedMemory shared_memory(std::size_t bytes) const;

 private:
  friend class detail::comm::Channel;
  explicit Communicator(std::shared_ptr<detail::comm::Channel> channel);

  std::shared_ptr<detail::comm::Channel> channel_;
};

}  // namespace muster
