// Collectives on raw memory: address, element type, count, operation. Uses no torch and exposes no MPI.
//
// Every call starts the operation and returns a Request. Collective calls on one communicator must come in the same
// order on all of its ranks. Counts are in elements and may exceed 2^31; larger counts than MPI's int holds are sent in
// chunks.
//
// If all ranks of a communicator share memory (src/node), barriers, broadcasts and reductions go through that memory.
// Across nodes an all-reduce uses it inside each node and exchanges slices between the nodes (hierarchy.hpp). MPI
// carries everything else.
#pragma once

#include "muster/communicator.hpp"
#include "muster/error.hpp"
#include "node/dtype.hpp"

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::comm {

using node::Dtype;
using node::size_of;

/// An operation that has been started. Move-only. It advances only inside calls of this process that wait for other
/// ranks or start an operation: done(), wait() and wait_until() of this or any other request, on any communicator, the
/// start of another operation, and the agreement of the ranks. See also comm/progress.hpp.
///
/// Destroying an unfinished request does not stop the operation, since other ranks may need this rank's part. Memory
/// passed to keep() then lives until MPI no longer uses it. Other memory must outlive the communicator, unless all
/// ranks share the memory of one node: then the operation continues in a private copy, or in registered memory.
class Request {
 public:
  struct State;

  Request() noexcept;  ///< a request that is finished
  explicit Request(std::unique_ptr<State> state) noexcept;
  Request(Request&&) noexcept;
  Request& operator=(Request&&) noexcept;
  ~Request();

  /// True if the operation has finished. Advances it and never blocks. Throws RemoteError if it has not finished and
  /// another rank has raised an alarm.
  bool done();
  /// True if the operation is not known to have finished. Advances nothing.
  bool pending() const noexcept;
  /// Waits until the operation has finished. `timeout`, and what is thrown: see wait_on().
  void wait(std::optional<std::chrono::milliseconds> timeout = {});
  /// Like wait(), but for a larger operation that this one belongs to: waits until ready() is true. This request must
  /// not have finished yet.
  void wait_until(const std::function<bool()>& ready, const std::string& doing,
                  std::optional<std::chrono::milliseconds> timeout = {});
  /// Throws the Error (ExitCode::retry) that a wait of this length throws. This request must not have finished yet.
  void fail_after(std::chrono::milliseconds timeout, const std::string& doing) const;
  /// The rank that a receive gets its message from; -1 for receive_any() until it has finished.
  int source() const noexcept;
  /// Holds `memory` until the operation has finished.
  void keep(std::shared_ptr<void> memory);

 private:
  std::unique_ptr<State> state_;
};

/// Data that this rank sends to another rank in an all-to-all, or receives from it.
struct Message {
  void* data = nullptr;
  std::size_t count = 0;  ///< elements
  int rank = 0;           ///< the receiver or the sender
};

/// Throws an Error (ExitCode::usage), whose text begins with `doing`, unless the operation is defined for the type.
void require_reducible(Dtype type, ReduceOp op, std::string_view doing);

/// The most elements in one MPI call.
inline constexpr std::size_t most_per_call = std::size_t{1} << 30;

/// The collectives of one communicator; a cheap value.
class Collectives {
 public:
  /// `chunk`: the most elements in one MPI call; tests make it small.
  explicit Collectives(Communicator communicator, std::size_t chunk = most_per_call);

  /// Sets the name under which this rank's record lists the operations started from now on. `name` has static storage.
  void set_name(const char* name) noexcept { name_ = name; }

  Request barrier();
  /// Copies the root's `data` to all ranks.
  Request broadcast(void* data, std::size_t count, Dtype type, int root);
  /// Reduces `data` in place, with the same bits on every rank. On booleans sum is or, product is and.
  Request all_reduce(void* data, std::size_t count, Dtype type, ReduceOp op);
  /// Puts the result into the root's `data`; the other ranks' data is not changed.
  Request reduce(void* data, std::size_t count, Dtype type, ReduceOp op, int root);
  /// Sends each of `sends` to its rank and fills each of `receives` from its rank. Between two ranks the k-th send
  /// matches the k-th receive, which has the same count. Messages from this rank to itself are copied. `sends` are only
  /// read.
  Request all_to_all(const std::vector<Message>& sends, const std::vector<Message>& receives, Dtype type);
  /// Point to point. Tags are from 0 to largest_tag(); they do not collide with those of collectives.
  Request send(const void* data, std::size_t count, Dtype type, int to, int tag);
  Request receive(void* data, std::size_t count, Dtype type, int from, int tag);
  /// Receives from the rank that sends first with that tag; `count` must not exceed one chunk.
  Request receive_any(void* data, std::size_t count, Dtype type, int tag);

  /// The largest tag that this MPI allows.
  static int largest_tag();

  const Communicator& communicator() const noexcept { return communicator_; }

 private:
  Communicator communicator_;
  std::size_t chunk_;
  const char* name_ = nullptr;
};

}  // namespace muster::detail::comm
