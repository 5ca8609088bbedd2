// How the rows of a column are spread over its chunks.
#pragma once

#include "base/export.hpp"
#include "base/runs.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace muster::detail::data {

/// A row lies in `chunks_per_row` chunks, of which each holds `rows_per_chunk` rows. Chunks are numbered as in
/// hdf5::ChunkIndex, so those of a row have neighbouring numbers.
class MUSTER_INTERNAL_API ChunkLayout {
 public:
  /// The values of a row that are in one chunk.
  struct Part {
    std::vector<std::int64_t> size;  ///< along each dimension but the first
    std::size_t in_row = 0;          ///< offset of the first one in the row, in bytes
  };

  /// The shapes of the column and of a chunk, in values. Their sizes in bytes must not overflow.
  ChunkLayout(std::vector<std::int64_t> shape, std::vector<std::int64_t> chunk, std::int64_t value_bytes);

  std::int64_t rows() const noexcept { return shape_.front(); }
  std::int64_t rows_per_chunk() const noexcept { return chunk_.front(); }
  std::int64_t chunks_per_row() const noexcept { return chunks_per_row_; }
  std::size_t row_bytes() const noexcept { return row_bytes_; }
  std::size_t row_bytes_in_chunk() const noexcept { return row_bytes_in_chunk_; }
  /// True if a chunk holds its rows one after the other, without anything between them.
  bool holds_whole_rows() const noexcept { return holds_whole_rows_; }
  /// The part of a row in chunk `number`.
  Part part(std::int64_t number) const;
  /// True if reading the part piece by piece is worth it: it is one run, or its runs have at least `least` bytes.
  bool has_runs_of(std::size_t least, const Part& part) const;
  /// Calls action(in_chunk, in_row, bytes) for each run of the chunk's first row, in ascending order: the offsets of
  /// the run in the chunk and in the row, in bytes.
  template <class Action>
  void each_run(const Part& part, Action&& action) const {
    detail::each_run(part.size, chunk_strides_, row_strides_, value_bytes_,
                     [&](std::size_t in_chunk, std::size_t in_row, std::size_t bytes) {
                       action(in_chunk, part.in_row + in_row, bytes);
                     });
  }

 private:
  std::vector<std::int64_t> shape_, chunk_;
  std::vector<std::size_t> chunk_strides_, row_strides_;  ///< of all dimensions but the first, in bytes
  std::int64_t chunks_per_row_ = 1;
  bool holds_whole_rows_;
  std::size_t value_bytes_, row_bytes_, row_bytes_in_chunk_;
};

}  // namespace muster::detail::data
