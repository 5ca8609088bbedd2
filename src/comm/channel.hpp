// What a Communicator stands on: MPI communicators from the pool, and the world that all channels of a launch share.
#pragma once

#include "comm/agreement.hpp"
#include "comm/alarm.hpp"
#include "comm/hierarchy.hpp"
#include "comm/mpi_call.hpp"
#include "comm/pool.hpp"
#include "comm/wait.hpp"
#include "comm/watch.hpp"
#include "comm/world.hpp"
#include "muster/communicator.hpp"

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

struct World {
  /// Takes three `communicators` of all its ranks, which are these `members` of the pool. Collective.
  World(std::shared_ptr<Pool> its_pool, std::vector<int> its_members, std::vector<PooledCommunicator> communicators,
        Placement where)
      : pool(std::move(its_pool)),
        members(std::move(its_members)),
        alarm(std::move(communicators[0])),
        agreement(std::move(communicators[1])),
        watch(std::move(communicators[2]), where),
        placement(std::move(where)) {}

  const std::shared_ptr<Pool> pool;
  const std::vector<int> members;  // [rank]: its number in the pool
  Alarm alarm;
  const PooledCommunicator agreement;     // used by agree() alone
  std::int64_t agreements = 0;            // that there have been
  std::atomic<std::int64_t> failures{0};  // of attempts on which ranks have agreed
  int depth = 0;                          // of attempts within attempts, on this rank
  /// A rank has left for an attempt around the one in which it met this rank: what was agreed on for that one.
  struct Outer {
    int depth = 0;
    std::vector<Outcome> outcomes;
  };
  std::optional<Outer> outer;
  /// There is an outer one: not all ranks would come to a call.
  std::atomic<bool> leaving{false};
  Watch watch;
  const Placement placement;
  std::atomic<std::chrono::milliseconds> limit{default_limit};  // of every wait
  std::atomic<std::chrono::milliseconds> final_grace{std::chrono::seconds(30)};
};

/// Carries the messages of a channel. Requests under way share it, so it may outlive the channel's use of it.
struct Transport {
  PooledCommunicator collective;
  PooledCommunicator point_to_point;
  /// Null where there is one rank, or where ranks of a node cannot share memory: MPI carries everything then.
  std::shared_ptr<Hierarchy> hierarchy;
};

class Channel {
 public:
  /// Takes two `communicators`. Collective: all ranks have come, and those of a node share memory from here on.
  Channel(std::vector<PooledCommunicator> communicators, std::shared_ptr<World> world, std::vector<int> world_ranks);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  ~Channel();

  static const std::shared_ptr<Channel>& of(const Communicator& communicator) noexcept { return communicator.channel_; }
  /// A communicator over a new channel. Collective.
  static Communicator open(std::vector<PooledCommunicator> communicators, std::shared_ptr<World> world,
                           std::vector<int> world_ranks) {
    return Communicator(std::make_shared<Channel>(std::move(communicators), std::move(world), std::move(world_ranks)));
  }
  /// A communicator of `ranks` of this channel, in that order. Collective over this channel: all ranks have come, and
  /// each names the part that it is in.
  Communicator open_part(const std::vector<int>& ranks, const char* doing) const;
  /// Takes MPI communicators of `ranks` of this channel from the pool. Collective as open_part() is.
  std::vector<PooledCommunicator> take_from_pool(std::size_t count, const std::vector<int>& ranks,
                                                 const char* doing) const;
  std::vector<int> all_ranks() const;
  /// The numbers that `ranks` of this channel have in the pool.
  std::vector<int> members(const std::vector<int>& ranks) const;

  /// Gives the world's own channel fresh communicators and memory: what ranks have left half done in it is forgotten,
  /// and copies of it are in step again. For agree(), in which all ranks have come. Collective.
  void renew();

  /// A call of this rank as its record has it, from here to its end. RemoteError where this rank is to leave for the
  /// agreement of an outer attempt: nothing has begun then.
  struct Begun {
    watch::Calls::Ticket ticket = 0;
    std::uint64_t turn = 0;  ///< among the collective ones of the channel
    int other = -1;          ///< of a message: the rank of the other side, if it is known
  };
  Begun begin(const node::Call& call, const char* name = nullptr);
  void end(const Begun& call) { world->watch.own().calls.end(call.ticket); }

  /// See wait_on(). `begun`: the call that waits.
  void wait(const std::function<bool()>& ready, const std::function<std::string()>& doing, const Begun& begun,
            std::optional<std::chrono::milliseconds> limit = {});

  /// Calls body(), which starts an operation in the hierarchy, ends one there or lets it advance: one thread at a time.
  template <class Body>
  auto drive(Body&& body) {
    const std::lock_guard lock(driving_);
    const Noted noted{*this};
    return body();
  }
  /// Makes progress with the operations of every channel of this process, so that ranks may wait for several in
  /// different orders: each needs the other's part of all of them. Local; errors are left to who waits for an
  /// operation.
  static void advance_all();
  /// Keeps `channel` until its operations on this node have finished or their attempt has failed: nobody waits for them
  /// here any more, but other ranks need this rank's part. Local; any thread.
  static void keep_until_idle(std::shared_ptr<Channel> channel);
  /// Releases those that are idle by now.
  static void release_idle();

  const std::shared_ptr<World> world;
  const std::vector<int> world_ranks;  // [rank]: rank in the world
  const int rank;
  const int size;
  const Topology topology;
  std::uint64_t id;         // the same on its ranks, and no other channel's
  std::uint64_t turns = 0;  // collective calls that there have been
  std::size_t turns_slot;   // of them in this rank's record
  std::shared_ptr<Transport> transport;
  Hierarchy* hierarchy() const noexcept { return transport->hierarchy.get(); }
  /// Since the last agreement; see rendezvous().
  struct {
    std::int64_t attempt = 0;
    std::int64_t count = 0;
  } rendezvous;

 private:
  /// Whether there is something to advance, as it is left.
  struct Noted {
    Channel& channel;
    ~Noted() { channel.note_under_way(); }
  };
  void note_under_way();
  bool is_under_way() const noexcept { return under_way_ == world->failures; }
  void try_to_advance();
  /// Ends what is under way between nodes, on this rank.
  void abandon_over_nodes();

  std::mutex driving_;
  /// The failed attempts that the world had when the operations under way were seen last; −1 where there are none. What
  /// a failed attempt has left half done stays so.
  std::atomic<std::int64_t> under_way_{-1};
};

}  // namespace muster::detail::comm
