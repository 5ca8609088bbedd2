// One column of one HDF5 file. It is checked when it is opened, and then read by rows.
#pragma once

#include "base/file.hpp"
#include "data/sources/chunked_column.hpp"
#include "data/sources/column_reader.hpp"
#include "data/sources/library_column.hpp"
#include "hdf5/conversion.hpp"
#include "hdf5/handle.hpp"
#include "muster/dataset.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace muster::detail::data {

/// The rows of a column in blocks of the size of a chunk. A block is all chunks that hold the same rows.
struct RowBlocks {
  std::int64_t rows = 0;  ///< of a block
  double count = 0;       ///< of blocks in the column
  double bytes = 0;       ///< of a block, decoded; chunks are whole, also at the edges of the column
  std::size_t slots = 0;  ///< by which HDF5 keeps any two chunks of neighbouring blocks at once
};

/// Values are read as they are stored, and then converted. Contiguous ones (ContiguousColumn) and chunks whose filters
/// are known here (ChunkedColumn) are read without HDF5 and its lock. HDF5 reads the others (LibraryColumn).
class Hdf5Column {
 public:
  /// `name`: path inside the file; `shown`: its name in errors; `decoding` outlives this. Throws an Error if it is not
  /// a column of numbers, or if its values lie outside of the file, lie beyond its end, or need a filter that is not
  /// there.
  Hdf5Column(hid_t file, const File& bytes, const std::string& name, std::string shown, ChunkDecoding& decoding);

  const Column& column() const noexcept { return column_; }
  std::int64_t rows() const noexcept { return rows_; }
  std::int64_t row_bytes() const noexcept { return row_bytes_; }
  /// True if the file must stay open in HDF5.
  bool needs_hdf5() const noexcept { return needs_hdf5_; }
  /// The way by which HDF5 reads the values; null if it does not.
  LibraryColumn* library() noexcept { return library_; }
  /// True if a row cannot be read without decoding or converting others: then values are worth keeping.
  bool needs_memory() const noexcept { return needs_memory_; }
  /// The chunks of the column; no rows if it has none.
  const RowBlocks& blocks() const noexcept { return blocks_; }
  /// The memory for all values, decoded, in bytes.
  double all_bytes() const noexcept;

  /// Reads rows in ascending order, each to memory of its own. Thread-safe.
  void read(const File& bytes, std::span<const RowDestination> wanted);
  /// Decodes the chunks of these rows, which ascend, if they can be kept. Thread-safe.
  void expect(const File& bytes, std::span<const std::int64_t> rows);

 private:
  void measure_chunks(hid_t creation);
  void choose_reader(hdf5::Handle dataset, const File& bytes, ChunkDecoding& decoding);
  /// The offset of contiguous values in the file, in bytes; none if nothing was ever written.
  std::optional<std::uint64_t> offset_of(hid_t dataset, const File& bytes) const;

  Column column_;
  std::string shown_;
  std::int64_t rows_ = 0, row_bytes_ = 0;
  std::int64_t stored_row_bytes_ = 0;
  std::optional<hdf5::Conversion> conversion_;
  bool needs_hdf5_ = true, needs_memory_ = true;
  RowBlocks blocks_;
  LibraryColumn* library_ = nullptr;
  std::unique_ptr<ColumnReader> reader_;
};

}  // namespace muster::detail::data
