// The state of a fused optimizer over several nodes. It exists once in the job: each node keeps the share that its
// ranks update. A node's copy (fused_step.hpp) has addresses for the whole state, but memory for that share only, until
// the shares are gathered for a reader of the whole.
#pragma once

#include "muster/communicator.hpp"
#include "node/dtype.hpp"
#include "node/shared_segment.hpp"

#include <cstddef>
#include <memory>
#include <vector>

namespace muster::detail::optim {

class ScatteredState {
 public:
  /// A chunk of state. This rank updates its node's share of it.
  struct Chunk {
    std::size_t offset = 0;  ///< bytes from the start of the segment
    std::size_t count = 0;   ///< elements
    node::Dtype type = node::Dtype::f32;
  };

  /// `chunks`: the same on each node. The communicator must not be used for anything else during gather().
  ScatteredState(Communicator communicator, std::shared_ptr<node::SharedSegment> segment, std::vector<Chunk> chunks);

  /// Reserves memory for this node's shares. Throws as SharedSegment::reserve(). Local.
  void reserve_shares() const;
  /// Gathers the whole state into the node's copy, unless no step has changed it since. Throws the same Error on all
  /// ranks if a node has no memory for it. Collective.
  void gather();
  /// True if the node's copy has the whole state; the same on all ranks.
  bool is_whole() const noexcept { return is_gathered_; }
  /// True if a step has changed the state since it was last whole; the same on all ranks.
  bool is_spread() const noexcept { return !whole_; }
  /// Call it after a step: only the shares are up to date. Frees the memory of everything else. Local.
  void note_step() noexcept;

 private:
  Communicator communicator_;
  std::shared_ptr<node::SharedSegment> segment_;
  std::vector<Chunk> chunks_;
  bool whole_ = true;  ///< true before the first step, too, when nobody needs the state of the copy
  bool is_gathered_ = false;
};

}  // namespace muster::detail::optim
