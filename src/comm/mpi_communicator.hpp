// An MPI communicator that is used again and again: by a channel, an alarm, a mailbox.
//
// Freeing a communicator is collective, but its user may end on one rank alone, for example when an exception unwinds.
// So nobody frees it: each rank gives it back to the pool (pool.hpp), and before the next use all of its ranks clean it
// together. Cleaning ends the operations that the last user has left and drops the messages that it has not received.
#pragma once

#include "node/call.hpp"

#include <mpi.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace muster::detail::comm {

/// A new number, the same on all ranks of `comm`. Its rank 0, which is rank `first` of the world, never gives it again.
/// Collective.
std::uint64_t new_id(MPI_Comm comm, int first);

class MpiCommunicator {
 public:
  /// `members`: its ranks, as the pool numbers them. `id`: the same on all of them; no other communicator of these
  /// members has it.
  MpiCommunicator(MPI_Comm comm, std::vector<int> members, std::uint64_t id);
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;
  /// Does not free the MPI communicator, nor memory that MPI may still use.
  ~MpiCommunicator();

  /// Starts a barrier, a broadcast, an all-reduce in place or a reduction, of up to 2^30 elements. The root of a
  /// reduction gets the result in `data`.
  MPI_Request start(const node::Call& call, void* data);

  /// Takes over requests that nobody on this rank waits for any more, and the memory that they use. Local; any thread.
  void abandon(std::vector<MPI_Request> receives, const std::vector<MPI_Request>& others, std::shared_ptr<void> memory);
  /// It cannot be cleaned, because this rank has left a handshake before its end. Local.
  void mark_unusable() noexcept { is_usable_ = false; }
  bool is_usable() const noexcept { return is_usable_; }

  // When this rank has no user of it any more:

  /// Frees the memory that was abandoned here, if MPI does not use it. Local.
  void free_memory() noexcept;
  /// Cancels the receives that were abandoned here. All ranks do it before any calls clean(). Local.
  void cancel_receives();
  /// Makes the communicator as good as new. False, on all ranks alike, if that is impossible, because ranks were in
  /// different collectives or too far apart. Throws an Error (ExitCode::retry), which begins with `doing`, if not all
  /// ranks come within half an hour. Collective.
  bool clean(const char* doing);

  const MPI_Comm comm;
  const std::vector<int> members;
  const std::uint64_t id;

 private:
  /// A rank can catch up with this many collectives that it has not begun.
  static constexpr std::size_t kept_calls = 256;
  /// What a rank tells the others when they clean: the last message of the old use.
  struct Marker {
    std::uint64_t id = 0;
    std::uint64_t begun = 0;                           ///< collectives in this use
    std::array<std::uint64_t, kept_calls> calls = {};  ///< [number of the collective % kept_calls]: node::Call::word()
  };

  std::vector<Marker> exchange_markers(const char* doing);
  bool receive_marker(int rank, std::optional<Marker>& marker);
  bool catch_up(const std::vector<Marker>& markers);
  bool all_finished();

  Marker mine_;
  bool is_usable_ = true;
  std::mutex mutex_;  ///< of what follows
  std::vector<MPI_Request> receives_;
  std::vector<MPI_Request> pending_;
  std::vector<std::shared_ptr<void>> memory_;
};

}  // namespace muster::detail::comm
