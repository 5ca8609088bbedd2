// What a Communicator stands on: one MPI communicator, and the world that all channels of a launch share.
#pragma once

#include "comm/agreement.hpp"
#include "comm/topology.hpp"
#include "muster/communicator.hpp"
#include "node/communicator.hpp"

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::comm {

/// Error notices between all ranks of a launch, over a communicator of their own.
class Alarm {
 public:
  explicit Alarm(MPI_Comm comm);

  /// Sends the notice to all other ranks, once per attempt.
  void raise(const Outcome& mine);
  /// What this rank has raised since the last clear(), if it has.
  const std::optional<Outcome>& raised() const noexcept { return raised_; }
  /// Throws the notice of another rank as RemoteError, again and again until clear().
  void check();
  /// Takes in the notices of the ranks that raised (`raised[rank]`), and is silent again.
  void clear(const std::vector<bool>& raised);

 private:
  void take(const MPI_Status& status);

  MPI_Comm comm_;
  int rank_ = 0;
  int size_ = 1;
  std::mutex mutex_;
  std::optional<Outcome> raised_;
  std::string sent_;                // stays until the sends are through
  std::vector<MPI_Request> sends_;  // of this attempt
  std::vector<bool> heard_;         // [rank], in this attempt
  std::atomic<bool> sounding_{false};
  int cause_rank_ = -1;
  ExitCode cause_code_ = ExitCode::done;
  std::string cause_;
};

constexpr std::chrono::milliseconds default_limit{1'800'000};

struct World {
  World(MPI_Comm alarm_comm, MPI_Comm agreement_comm, Placement where)
      : alarm(alarm_comm), agreement(agreement_comm), placement(std::move(where)) {}

  Alarm alarm;
  MPI_Comm agreement;           // used by agree() alone
  std::int64_t agreements = 0;  // that there have been
  const Placement placement;
  std::atomic<std::int64_t> limit_ms{default_limit.count()};
};

class HierarchicalAllReduce;

/// What the ranks of a channel on one node have in common.
struct Node {
  std::vector<int> ranks;        ///< [local size]: rank in the channel
  std::shared_ptr<void> memory;  ///< the communicator's
  std::unique_ptr<node::Communicator> communicator;
  /// Ranks of each node that take part in what goes between nodes: the least that a node has.
  int owners = 1;
  /// [num_nodes][owners]: rank in the channel.
  std::vector<std::vector<int>> owners_of_node;
  unsigned exchanges = 0;  ///< that there have been between this rank and its fellow owners
  /// Those under way, in the order in which they were started; every wait on the channel advances all of them.
  std::deque<std::shared_ptr<HierarchicalAllReduce>> over_nodes;
};

class Channel {
 public:
  /// Takes `collective` and `point_to_point`, duplicates that nobody else uses.
  Channel(MPI_Comm collective, MPI_Comm point_to_point, std::shared_ptr<World> world, std::vector<int> world_ranks);

  MPI_Comm collective;
  MPI_Comm point_to_point;
  const std::shared_ptr<World> world;
  const std::vector<int> world_ranks;  // [rank]: rank in the world
  int rank = 0;
  int size = 1;
  Topology topology;
  /// Since the last agreement; see meeting.hpp.
  struct {
    std::int64_t attempt = 0;
    std::int64_t count = 0;
  } meetings;
  /// Null where there is one rank, or where ranks of a node cannot share memory, and until attach_node().
  std::unique_ptr<Node> node;
};

/// A communicator over a channel, whose ranks share memory from here on. Collective.
Communicator open(std::shared_ptr<Channel> channel);

/// Gives the world's own channel fresh communicators and memory: what ranks have left half done in it is forgotten, and
/// copies of it are in step again. For agree(), in which all ranks have come. Collective.
void renew(const Communicator& world);

/// A duplicate with MPI_ERRORS_RETURN. Collective.
MPI_Comm duplicate(MPI_Comm comm);

/// A world of its own over `comm`, whose ranks are where MPI says. Collective.
Communicator make_world(MPI_Comm comm);

}  // namespace muster::detail::comm
