// How the rows of a column are spread over its chunks.
#pragma once

#include "base/export.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace muster::detail::data {

/// Bytes that follow one another both in a chunk and in a row. The places are those in the first row of the chunk.
struct ByteRun {
  bool operator==(const ByteRun&) const = default;

  std::size_t in_chunk = 0, in_row = 0, bytes = 0;
};

/// A row lies in `chunks_per_row` chunks, of which each holds `rows_per_chunk` rows. Chunks are numbered as in
/// hdf5::ChunkIndex, so those of a row have neighbouring numbers.
class MUSTER_INTERNAL_API ChunkLayout {
 public:
  /// `shape` of the column and of a chunk, in values. Their bytes can be counted.
  ChunkLayout(std::vector<std::int64_t> shape, std::vector<std::int64_t> chunk, std::int64_t value_bytes);

  std::int64_t rows() const noexcept { return shape_.front(); }
  std::int64_t rows_per_chunk() const noexcept { return chunk_.front(); }
  std::int64_t chunks_per_row() const noexcept { return chunks_per_row_; }
  std::size_t row_bytes_in_chunk() const noexcept { return row_bytes_in_chunk_; }
  /// The runs of the first row of chunk `number`, in ascending order and all of the same size.
  std::vector<ByteRun> runs(std::int64_t number) const;

 private:
  std::vector<std::int64_t> shape_, chunk_, grid_;
  std::int64_t chunks_per_row_ = 1;
  std::size_t value_bytes_, row_bytes_in_chunk_ = 0;
};

}  // namespace muster::detail::data
