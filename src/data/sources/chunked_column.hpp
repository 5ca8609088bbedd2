// A column whose values lie in chunks of the file, compressed or not.
#pragma once

#include "data/sources/chunk_layout.hpp"
#include "data/sources/chunk_reader.hpp"
#include "data/sources/column_reader.hpp"

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace muster::detail::data {

/// Rows of chunks that are stored as they are come from the file straight into their destinations. Other chunks are
/// decoded.
class ChunkedColumn final : public ColumnReader {
 public:
  ChunkedColumn(std::unique_ptr<ChunkReader> chunks, ChunkLayout layout);

  void read(const File& bytes, std::span<const RowDestination> wanted) override;
  void expect(const File& bytes, std::span<const std::int64_t> rows) override;
  /// True if a row is read by itself: its chunks are stored as they are, and few pieces of them make the row.
  bool reads_rows_alone() const;

 private:
  class Use;
  /// Reads the chunks of the wanted rows, or lets them be decoded ahead.
  void read_chunks(const File& bytes, std::span<const RowDestination> wanted, bool ahead);
  /// The runs of a chunk, in `memory` if they are not the same for all chunks.
  const std::vector<ByteRun>& runs(std::int64_t number, std::vector<ByteRun>& memory) const;

  std::unique_ptr<ChunkReader> chunks_;
  ChunkLayout layout_;
  std::vector<ByteRun> runs_;  ///< of every chunk, if a row lies in one
};

}  // namespace muster::detail::data
