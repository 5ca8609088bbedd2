// Collectives on raw memory. Knows no torch and shows no MPI: memory, type, count, operation.
//
// Every call starts the operation and returns a Request. Calls on one communicator must come in the same order on all
// of its ranks. Counts are in elements and may exceed 2^31: what MPI's int cannot hold goes in chunks.
//
// Where the ranks of a communicator share memory (src/node), barriers, broadcasts and reductions go through it; across
// nodes an all-reduce goes through it inside each node, and in slices between them (hierarchy.hpp). Everything else is
// MPI's.
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

/// An operation under way. Move-only. It makes progress only while this process waits: inside done() and wait(), its
/// own or another's, of any communicator.
///
/// Destroying one that has not finished leaves it to itself: the other ranks may still need this one's part. What it
/// holds by keep() then lives until MPI no longer uses it; memory that it does not hold must outlive the communicator,
/// except in what the ranks of one node do among themselves, which goes on in memory of its own.
class Request {
 public:
  struct State;

  Request() noexcept;  ///< finished
  explicit Request(std::unique_ptr<State> state) noexcept;
  Request(Request&&) noexcept;
  Request& operator=(Request&&) noexcept;
  ~Request();

  /// Whether it has finished; makes progress, never blocks. Throws what another rank has raised.
  bool done();
  /// Whether it was seen to be under way; makes no progress.
  bool pending() const noexcept;
  /// Until it has finished. Without a limit the launch's limit holds; past it an Error with ExitCode::retry.
  void wait(std::optional<std::chrono::milliseconds> limit = {});
  /// As wait() does, for what this operation is a part of: until ready() is true. It has not finished yet.
  void wait_until(const std::function<bool()>& ready, const std::string& doing,
                  std::optional<std::chrono::milliseconds> limit = {});
  /// The rank that a receive() from any rank heard; -1 before it has finished.
  int source() const noexcept;
  /// Holds `memory` until it has finished.
  void keep(std::shared_ptr<void> memory);

 private:
  std::unique_ptr<State> state_;
};

/// What goes to another rank of an all-to-all, or comes from it.
struct Message {
  void* data = nullptr;
  std::size_t count = 0;  ///< elements
  int rank = 0;           ///< the other side
};

/// An Error (ExitCode::usage) that begins with `doing` unless the operation has a meaning for the type.
void require_reducible(Dtype type, ReduceOp op, std::string_view doing);

/// Elements in one MPI call at the most.
inline constexpr std::size_t most_per_call = std::size_t{1} << 30;

/// The collectives of one communicator; a cheap value.
class Collectives {
 public:
  /// `chunk`: elements in one MPI call at the most; tests make it small.
  explicit Collectives(Communicator communicator, std::size_t chunk = most_per_call);

  /// How the caller calls what it starts from now on, in this rank's record; of static storage.
  void name(const char* name) noexcept { name_ = name; }

  Request barrier();
  /// `data` of the root, to all.
  Request broadcast(void* data, std::size_t count, Dtype type, int root);
  /// In place on every rank. Same bits on every rank. On boolean: sum is or, product is and.
  Request all_reduce(void* data, std::size_t count, Dtype type, ReduceOp op);
  /// The result in `data` of the root; the other ranks' data stays as it is.
  Request reduce(void* data, std::size_t count, Dtype type, ReduceOp op, int root);
  /// Sends each of `sends` to its rank and fills each of `receives` from its rank; between two ranks the k-th send
  /// meets the k-th receive, of the same count. Pieces of this rank to itself are copied. What is sent is not written.
  Request all_to_all(const std::vector<Message>& sends, const std::vector<Message>& receives, Dtype type);
  /// Point to point, in a space of tags (≥ 0) of its own.
  Request send(const void* data, std::size_t count, Dtype type, int to, int tag);
  Request receive(void* data, std::size_t count, Dtype type, int from, int tag);
  /// From whoever sends first with that tag; count within one chunk.
  Request receive_any(void* data, std::size_t count, Dtype type, int tag);

  const Communicator& communicator() const noexcept { return communicator_; }

 private:
  Communicator communicator_;
  std::size_t chunk_;
  const char* name_ = nullptr;
};

}  // namespace muster::detail::comm
