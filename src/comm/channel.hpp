// The implementation of Communicator: MPI communicators from the pool, and the world to which its ranks belong
// (world.hpp).
#pragma once

#include "comm/hierarchy.hpp"
#include "comm/pool.hpp"
#include "comm/world.hpp"
#include "muster/communicator.hpp"
#include "watch/trace.hpp"

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::comm {

/// Carries the messages of a channel. Unfinished requests share it, so it may live on after Channel::renew().
struct Transport {
  PooledCommunicator collective;
  PooledCommunicator point_to_point;
  /// Null if there is only one rank, or if the ranks of a node cannot share memory; MPI then carries everything.
  std::shared_ptr<Hierarchy> hierarchy;
};

/// Starts the calls of one communicator and waits for them.
class Channel {
 public:
  /// Takes two `communicators`. Sets up the memory that the ranks of each node share. Collective, without the launch's
  /// timeout: all ranks must have come (see wait_for_all_ranks()).
  Channel(std::vector<PooledCommunicator> communicators, std::shared_ptr<World> world, std::vector<int> world_ranks);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  ~Channel();

  static const std::shared_ptr<Channel>& of(const Communicator& communicator) noexcept { return communicator.channel_; }
  /// Returns a communicator over a new channel. Collective.
  static Communicator open(std::vector<PooledCommunicator> communicators, std::shared_ptr<World> world,
                           std::vector<int> world_ranks) {
    return Communicator(std::make_shared<Channel>(std::move(communicators), std::move(world), std::move(world_ranks)));
  }
  /// Returns a communicator over `ranks` of this channel, in that order. Collective over `ranks`: all of them must
  /// come.
  Communicator open_part(const std::vector<int>& ranks, const char* doing) const;
  /// Takes MPI communicators over `ranks` of this channel from the pool. Collective like open_part().
  std::vector<PooledCommunicator> take_from_pool(std::size_t count, const std::vector<int>& ranks,
                                                 const char* doing) const;
  std::vector<int> all_ranks() const;
  /// Returns the pool's numbers of `ranks` of this channel.
  std::vector<int> members(const std::vector<int>& ranks) const;

  /// Gives the world's own channel fresh communicators and memory. Operations left half done are dropped, and the call
  /// counts of all ranks agree again. Called by agree() once all ranks have come. Collective.
  void renew();

  /// A call in this rank's record, from begin() to end().
  struct RecordedCall {
    watch::CallLog::Ticket ticket = 0;
    std::uint64_t call_number = 0;  ///< number among the collective calls of the channel; 0 for a message
    int other = -1;                 ///< for a message: the rank on the other side, if it is known
    watch::TraceEvent event = {};   ///< the trace event of a collective call; begin_ns is 0 if nothing is recorded
  };
  /// Records the call. Throws as require_in_use() does, and RemoteError if this rank must return to an outer attempt.
  RecordedCall begin(const node::Call& call, const char* name = nullptr);
  void end(const RecordedCall& call) {
    world->wait_monitor.own_record().calls.end(call.ticket);
    watch::record_until_now(call.event);
  }

  /// Waits like wait_on(). `recorded_call` is the call that waits.
  void wait(const std::function<bool()>& ready, const std::function<std::string()>& doing,
            const RecordedCall& recorded_call, std::optional<std::chrono::milliseconds> timeout = {});
  /// Throws the Error (ExitCode::retry), whose text begins with `doing`, of an operation that has not finished within
  /// `longest`; it names the late ranks. If they have announced that they will be late, and the timeout is not the
  /// operation's own (`is_own`), returns how much longer to wait instead. Throws as WaitMonitor::decide() does, too.
  /// `since`, `suspended`: see WaitMonitor::decide().
  std::chrono::milliseconds past_timeout(const RecordedCall& recorded_call, const std::string& doing,
                                         std::chrono::nanoseconds since, std::chrono::nanoseconds suspended,
                                         std::chrono::milliseconds longest, bool is_own) const;

  /// Calls body(), which starts, ends or advances an operation of the hierarchy. Only one thread at a time runs a body.
  template <class Body>
  auto run_exclusively(Body&& body) {
    const std::lock_guard lock(exclusive_);
    const UnderWayUpdate update{*this};
    return body();
  }
  /// Advances the hierarchies' operations of all channels of this process, except those that another thread uses now.
  /// This is necessary because two ranks may wait for several operations in different orders, and each rank then needs
  /// the other rank's part in all of them. Local. The error of an operation is thrown where its caller waits, not here.
  static void advance_all();
  /// Keeps `channel` alive until its operations on this node have finished or their attempt has failed. This rank no
  /// longer waits for these operations, but other ranks need its part. Local; any thread.
  static void keep_until_idle(std::shared_ptr<Channel> channel);
  /// Releases the kept channels that are idle now.
  static void release_idle();

  const std::shared_ptr<World> world;
  const std::vector<int> world_ranks;  // [rank]: rank in the world
  const int rank;
  const int size;
  const Topology topology;
  std::uint64_t id;              // the same on all of its ranks; unique to this channel
  std::uint64_t call_count = 0;  // collective calls so far
  std::size_t call_count_slot;   // the slot of `call_count` in this rank's record
  std::shared_ptr<Transport> transport;
  Hierarchy* hierarchy() const noexcept { return transport->hierarchy.get(); }
  /// Counts the calls of wait_for_all_ranks() in this attempt.
  struct {
    std::int64_t attempt = 0;  ///< number of agreements before it
    std::int64_t count = 0;
  } rendezvous;

 private:
  /// The destructor notes whether operations are still under way.
  struct UnderWayUpdate {
    Channel& channel;
    ~UnderWayUpdate() { channel.note_under_way(); }
  };
  void note_under_way();
  bool is_under_way() const noexcept { return under_way_ == world->failures; }
  void try_to_advance();
  /// Abandons this rank's unfinished operations between nodes. Local.
  void abandon_over_nodes();

  std::mutex exclusive_;
  /// The value of World::failures when operations were last seen under way; −1 if none are. If an attempt has failed
  /// since then, the operations will never finish, so they no longer count as under way.
  std::atomic<std::int64_t> under_way_{-1};
};

}  // namespace muster::detail::comm
