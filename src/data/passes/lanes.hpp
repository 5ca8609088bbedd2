// The shuffled order of a dataset that is stored in blocks, such as the chunks of an HDF5 file. Each block is read
// once.
//
// The blocks are put in random order and dealt out to lanes. A lane gives the rows of its first block in random order,
// then those of its second block, and so on. The pass takes one row from each lane in turn. So at any time it mixes the
// rows of as many blocks as there are lanes, and a rank that takes all rows of some lanes is the only one that reads
// their blocks. The order depends on the key and the Blocks alone, not on the number of ranks.
#pragma once

#include "data/sources/permutation.hpp"
#include "data/sources/sample_layout.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace muster::detail::data {

class Lanes {
 public:
  /// Blocks::rows, Blocks::lanes and the number of files must be at least 1.
  Lanes(const Blocks& blocks, std::uint64_t key);

  /// The number of lanes: Blocks::lanes, or the number of blocks if there are fewer.
  int count() const noexcept { return static_cast<int>(lengths_.size()); }
  std::int64_t size() const noexcept { return size_; }
  std::int64_t block_rows() const noexcept { return block_rows_; }
  /// Rows of a lane.
  std::int64_t length(int lane) const noexcept { return lengths_[static_cast<std::size_t>(lane)]; }
  /// How many of the pass's first `position` rows come from each lane.
  std::vector<std::int64_t> taken(std::int64_t position) const;
  /// The lane's row `index`, 0 ≤ index < length(lane).
  std::int64_t row(int lane, std::int64_t index) const noexcept;
  /// The row at a position of the pass, 0 ≤ position < size().
  std::int64_t row_at(std::int64_t position) const;
  struct NextBlock {
    std::int64_t row;    ///< one of its rows
    std::int64_t first;  ///< the lane's row with which it begins
  };
  /// The lane's next block if it is time to read it, while the lane gives its rows `first` … `last` − 1. The lanes
  /// change blocks at about the same time; their turns to read ahead are spread over the first seven eighths of a
  /// block, so that there is time to decode the last of them.
  std::optional<NextBlock> block_to_read_ahead(int lane, std::int64_t first, std::int64_t last) const noexcept;

 private:
  struct Place {
    std::int64_t block;   ///< number of the block in its lane
    std::int64_t offset;  ///< number of the row in its block, before the block is shuffled
  };
  Place place_of(int lane, std::int64_t index) const noexcept;
  /// How many full turns over the lanes come before the position. A lane without rows left is skipped in a turn.
  std::int64_t rounds_before(std::int64_t position) const noexcept;
  std::int64_t block_at(std::int64_t slot) const noexcept;
  std::int64_t row_of(std::int64_t number) const noexcept;

  std::int64_t size_ = 0;
  std::int64_t block_rows_;
  std::int64_t blocks_;     ///< number of blocks
  std::int64_t last_rows_;  ///< rows of the last block, which may be short
  std::int64_t last_slot_;  ///< the place of the last block among the shuffled blocks
  std::uint64_t key_;
  Permutation block_order_;  ///< of all blocks but the last one
  std::vector<std::int64_t> lengths_;
  // Inside this class the rows are numbered anew: first the rows in whole blocks, of all files, then the rows in short
  // blocks at the ends of files, of which new blocks are made. For each file:
  std::vector<std::int64_t> first_whole_;  ///< the new number of its first row in a whole block
  std::vector<std::int64_t> first_rest_;   ///< the new number of its first row in a short block
  std::vector<std::int64_t> first_row_;    ///< the number of its first row in the dataset
};

}  // namespace muster::detail::data
