// The shuffled order of a dataset that is stored in blocks, such as the chunks of an HDF5 file. Each block is read
// once.
//
// The blocks, in random order, are dealt out to lanes. A lane gives the rows of one block in random order, then those
// of its next block. The pass takes one row from each lane in turn, so the rows of as many blocks as there are lanes
// are mixed at any time. A rank that takes whole lanes reads blocks that no other rank reads. Like a full shuffle, the
// order is a pure function, and does not depend on the number of ranks.
#pragma once

#include "data/passes/permutation.hpp"

#include <cstdint>
#include <vector>

namespace muster::detail::data {

/// The rows of files that are stored in blocks, numbered through all files.
struct Blocks {
  std::int64_t rows = 0;                 ///< of a block; the last block of a file may be shorter
  std::vector<std::int64_t> files = {};  ///< rows of each file
  int lanes = 64;
};

class Lanes {
 public:
  /// Blocks::rows, Blocks::lanes and the number of files are at least 1.
  Lanes(const Blocks& blocks, std::uint64_t key);

  /// At most Blocks::lanes and the number of blocks.
  int count() const noexcept { return static_cast<int>(lengths_.size()); }
  std::int64_t size() const noexcept { return size_; }
  /// Rows of a lane.
  std::int64_t length(int lane) const noexcept { return lengths_[static_cast<std::size_t>(lane)]; }
  /// How many of the pass's first `position` rows come from each lane.
  std::vector<std::int64_t> taken(std::int64_t position) const;
  /// The lane's row `index`, 0 ≤ index < length(lane).
  std::int64_t row(int lane, std::int64_t index) const noexcept;
  /// The row at a position of the pass, 0 ≤ position < size().
  std::int64_t row_at(std::int64_t position) const;
  /// A row of the lane's next block if that is to be read ahead while the lane gives its rows `first` … `last` − 1,
  /// else −1. Each lane reads ahead at another place of its block, so that the reads are spread over time.
  std::int64_t row_to_read_ahead(int lane, std::int64_t first, std::int64_t last) const noexcept;

 private:
  /// A row of a lane: the number of its block in the lane, and its place in the block.
  struct Place {
    std::int64_t block, offset;
  };
  Place place_of(int lane, std::int64_t index) const noexcept;
  std::int64_t rounds_before(std::int64_t position) const noexcept;
  std::int64_t block_at(std::int64_t slot) const noexcept;
  std::int64_t row_of(std::int64_t number) const noexcept;

  std::int64_t size_ = 0;
  std::int64_t block_rows_;
  std::int64_t blocks_;     ///< number of blocks
  std::int64_t last_rows_;  ///< rows of the last block
  std::int64_t last_slot_;  ///< where the last block comes among the shuffled blocks
  std::uint64_t key_;
  Permutation order_;  ///< of the other blocks
  std::vector<std::int64_t> lengths_;
  // Rows are numbered so that the whole blocks of all files come first, and then the shorter ones at the ends of files,
  // which are divided into blocks anew. These are the numbers of each file's first row of either kind.
  std::vector<std::int64_t> first_whole_, first_rest_, first_row_;
};

}  // namespace muster::detail::data
