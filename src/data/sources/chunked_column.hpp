// A column whose values lie in chunks of the file, compressed or not.
#pragma once

#include "data/sources/chunk_layout.hpp"
#include "data/sources/chunk_reader.hpp"
#include "data/sources/column_reader.hpp"

#include <cstdint>
#include <memory>
#include <span>

namespace muster::detail::data {

/// Rows of chunks that are stored as they are come from the file straight into their destinations, unless a row is many
/// short pieces of chunks that can be kept. Other chunks are read whole and decoded.
class ChunkedColumn final : public ColumnReader {
 public:
  ChunkedColumn(std::unique_ptr<ChunkReader> chunks, ChunkLayout layout);

  void read(const File& bytes, std::span<const RowDestination> wanted) override;
  void expect(const File& bytes, std::span<const RowRange> rows, Ahead how) override;
  /// True if each row is read by itself: chunks are stored as they are, and hold a row in one piece or in long ones.
  bool reads_rows_alone() const;

 private:
  class Use;
  void each_chunk(std::int64_t row_of_chunks, std::int64_t taken, auto&& action) const;

  std::unique_ptr<ChunkReader> chunks_;
  ChunkLayout layout_;
};

}  // namespace muster::detail::data
