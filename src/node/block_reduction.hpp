// A reduction over a fixed list of blocks that is run again and again, as gradients are.
//
// Every rank publishes where its blocks lie in registered memory, one after the other in an agreed order, each as soon
// as it is complete. A block that all ranks have published may be worked on, in parts, by whoever comes first: the rank
// that is early does more, and nobody waits for a turn. A round ends when all parts are done and all ranks know.
//
//   reduction.begin();
//   for (…) reduction.publish(address);             // every block, in order
//   while (!reduction.advance(sum)) …;              // now every rank's blocks hold the result
#pragma once

#include "node/dtype.hpp"
#include "node/team.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace muster::detail::node {

class BlockReduction {
 public:
  struct Block {
    std::size_t count = 0;  ///< elements
    Dtype type = Dtype::f32;
  };
  /// What one rank works on at once.
  struct Part {
    std::size_t number = 0;  ///< among all parts
    std::size_t block = 0;
    std::size_t first = 0;  ///< element of the block
    std::size_t count = 0;
  };
  /// Does the work on a part; data[r] is where the part begins in the memory of rank r. It is called once per part and
  /// round, by any of the ranks.
  using Work = std::function<void(const Part& part, std::span<std::byte* const> data)>;

  /// Bytes of memory, aligned to a page, for that many blocks and notes.
  static std::size_t memory(int size, std::size_t blocks, std::size_t notes);

  /// `memory`: as for a Team, and the same for all ranks; `region` holds the ranks' blocks. Blocks and the number of
  /// notes are the same on all ranks.
  BlockReduction(std::byte* memory, Region region, int rank, int size, std::vector<Block> blocks, std::size_t notes);

  const std::vector<Block>& blocks() const noexcept { return blocks_; }
  std::size_t parts() const noexcept { return parts_.size(); }

  /// A new round; the one before has ended.
  void begin();
  /// The next block in the order lies at `data`, in this rank's part of the region, and stays there until the round has
  /// ended.
  void publish(const void* data);
  /// A word that all ranks can read when the round has ended; each is written in every round, before the last block is
  /// published.
  void write_note(std::size_t index, std::uint32_t note);
  /// Does the work on one part if one is ready; true when the round has ended. All ranks give the same work.
  bool advance(const Work& work);
  /// Does the work on one part if one is ready, and says whether it did: for a second thread of this rank, from begin()
  /// until the rank calls advance(). The second thread has a Work of its own.
  bool help(const Work& work) { return work_on_next(helper_, work) == Next::done; }

  /// Order in which blocks are published and worked on from the next round on, a permutation of their indices, at first
  /// that of the list. Between two rounds, the same on all ranks.
  void reorder(const std::vector<std::size_t>& order);
  const std::vector<std::size_t>& order() const noexcept { return order_; }

  /// Of the round that has ended, until the next begins.
  std::uint32_t note(int rank, std::size_t index) const;

 private:
  struct Shared;
  /// One of the rank's threads.
  struct Worker {
    std::size_t ready = 0;  ///< blocks that all ranks have published, as far as it knows
    std::vector<std::byte*> data = {};
  };
  /// What became of the next part.
  enum class Next { done, not_ready, none_left };

  Next work_on_next(Worker& worker, const Work& work) const;
  /// What the rank writes in this round: the offsets of its blocks, then its notes.
  std::uint64_t* words(int rank) const;
  /// Blocks that all ranks have published.
  std::size_t published() const;

  Shared* shared_;
  Region region_;
  int rank_;
  int size_;
  std::vector<Block> blocks_;
  std::size_t notes_;
  std::vector<std::size_t> order_;     ///< blocks
  std::vector<std::size_t> position_;  ///< [blocks] in that order
  std::vector<Part> parts_;            ///< in that order
  Worker own_, helper_;
  std::uint64_t round_ = 0;
  std::size_t mine_ = 0;  ///< blocks that this rank has published
  bool finished_ = true;
};

/// The work of an average: the sum over the ranks, in their order, times `scale`, to all of them.
BlockReduction::Work in_place_sum(std::vector<BlockReduction::Block> blocks, double scale);

}  // namespace muster::detail::node
