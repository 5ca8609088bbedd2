// An MPI communicator that is reused, by one channel, alarm or mailbox after another.
//
// Freeing a communicator is collective, but its user may end on one rank alone, for example when an exception unwinds.
// So nobody frees it. Each rank gives it back to the pool (pool.hpp), and before the next use all of its ranks clean it
// together. Cleaning ends the operations that the last user has abandoned and drops the messages that it has not
// received. For this, each rank sends one message to every rank to which it has sent messages, and about 3 log₂ p
// others.
#pragma once

#include "node/call.hpp"

#include <mpi.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::comm {

/// Returns a new number, the same on all ranks of `comm` and unique in the world. `first` is the world rank of rank 0
/// of `comm`. Collective.
std::uint64_t new_id(MPI_Comm comm, int first);

/// Owns an MPI communicator, and cleans it before each use but the first.
class MpiCommunicator {
 public:
  /// `members`: the pool's numbers of its ranks. `id`: the same on all of its ranks, and unique among the communicators
  /// of these members.
  MpiCommunicator(MPI_Comm comm, std::vector<int> members, std::uint64_t id);
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;
  /// Does not free the MPI communicator, nor memory that MPI may still use.
  ~MpiCommunicator();

  /// Starts a barrier, a broadcast, an all-reduce in place or a reduction, of up to 2^30 elements. The root of a
  /// reduction gets the result in `data`.
  MPI_Request start(const node::Call& call, void* data);
  /// Starts a message to a rank.
  MPI_Request send(const void* data, int count, MPI_Datatype type, int to, int tag);

  /// Sends bytes to a rank, for which nobody waits, and keeps them until MPI has read them. Local; any thread.
  void post(std::string bytes, int to, int tag);

  /// Takes over requests for which this rank no longer waits, and the memory that they use. Local; any thread.
  void abandon(std::vector<MPI_Request> receives, const std::vector<MPI_Request>& others, std::shared_ptr<void> memory);
  /// Notes that the communicator cannot be cleaned, because this rank has left a handshake before its end. Local.
  void mark_unusable() noexcept { is_usable_ = false; }
  bool is_usable() const noexcept { return is_usable_; }

  // Call these after the last user on this rank has ended:

  /// Frees the abandoned memory if MPI no longer uses it. Local.
  void free_memory() noexcept;
  /// Cancels the abandoned receives. All ranks must have done so before any of them calls clean(). Local.
  void cancel_receives();
  /// Sets each value to its maximum over the ranks of the communicator, without using the communicator. Calls its
  /// second argument again and again while it waits.
  using AllMax = std::function<void(std::span<std::uint64_t>, const std::function<void()>&)>;
  /// Ends the operations and drops the messages that the last user has left, so that the communicator can be used
  /// again. False, on all ranks, if that is impossible because the ranks were in different collectives, or one rank had
  /// missed too many or too large ones. Throws an Error (ExitCode::retry), whose text begins with `doing`, if not all
  /// ranks come within half an hour. Collective.
  bool clean(const char* doing, const AllMax& all_max);

  const MPI_Comm comm;
  const std::vector<int> members;
  const std::uint64_t id;

 private:
  /// How many collectives a rank can miss and still catch up.
  static constexpr std::size_t kept_calls = 256;

  void drop_messages(const char* doing, const AllMax& all_max);
  void receive_all();
  bool catch_up(const AllMax& all_max);
  bool all_finished();

  std::uint64_t begun_ = 0;  ///< collectives since the last clean()
  /// [number of the collective % kept_calls]: node::Call::encode()
  std::array<std::uint64_t, kept_calls> calls_ = {};
  const std::unique_ptr<std::atomic<bool>[]> has_sent_to_;  ///< [rank]: true after a message to it, until clean()
  bool is_usable_ = true;
  struct Posted {
    MPI_Request request;
    std::shared_ptr<std::string> bytes;
  };
  std::mutex mutex_;  ///< guards the members below
  std::deque<Posted> posted_;
  // Abandoned requests and memory.
  std::vector<MPI_Request> receives_;
  std::vector<MPI_Request> pending_;
  std::vector<std::shared_ptr<void>> memory_;
};

}  // namespace muster::detail::comm
