// An all-reduce over several nodes: inside each node every owner reduces its slice, the owners of the same slice
// exchange it between the nodes, and each shares it inside its node. So every owner's link works, and what leaves a
// node is the least that can: 2 S (n - 1) / n bytes for S bytes on n nodes.
#pragma once

#include "comm/channel.hpp"
#include "node/team.hpp"

#include <cstddef>
#include <memory>
#include <vector>

namespace muster::detail::comm {

/// The exchange of one slice among the ranks that own it on each node. Sums are formed in the order of nodes, each part
/// on one node or on all alike: the same bits everywhere.
class SliceExchange {
 public:
  SliceExchange(std::shared_ptr<Channel> channel, std::byte* data, std::size_t count, const node::Reduction& reduction);
  ~SliceExchange();
  SliceExchange(const SliceExchange&) = delete;
  SliceExchange& operator=(const SliceExchange&) = delete;

  bool advance();

 private:
  node::Team::Slice part_of(int node) const;
  void send(const std::byte* data, std::size_t count, int node, int tag);
  void receive(std::byte* data, std::size_t count, int node, int tag);
  void scatter();
  void reduce_mine();
  void gather();
  bool test();

  std::shared_ptr<Channel> channel_;
  std::byte* data_;
  std::size_t count_;
  node::Reduction reduction_;
  int nodes_;
  int here_;
  unsigned number_;  ///< of this exchange, the same on all nodes
  bool whole_;       ///< every node reduces the whole slice: one exchange in place of two
  struct Memory;
  std::unique_ptr<Memory> memory_;  ///< what MPI may touch
  enum class State { scattering, gathering, done } state_ = State::scattering;
};

class HierarchicalAllReduce : public std::enable_shared_from_this<HierarchicalAllReduce> {
 public:
  /// In place.
  static std::shared_ptr<HierarchicalAllReduce> start(std::shared_ptr<Channel> channel, void* data, std::size_t count,
                                                      const node::Reduction& reduction);

  /// Makes progress; true at the end.
  bool advance();

 private:
  struct Piece {
    std::byte* data = nullptr;
    std::size_t count = 0;
    int owners = 1;
    node::Team::Ticket reduced = 0;
    node::Team::Ticket shared = 0;
    std::unique_ptr<SliceExchange> exchange = nullptr;
    bool exchanged = false;
  };

  HierarchicalAllReduce(std::shared_ptr<Channel> channel, const node::Reduction& reduction)
      : channel_(std::move(channel)), reduction_(reduction) {}
  /// Whether this rank's slice of the piece has been exchanged; makes progress.
  bool exchange(Piece& piece);

  std::shared_ptr<Channel> channel_;
  node::Reduction reduction_;
  std::vector<Piece> pieces_;
};

}  // namespace muster::detail::comm
