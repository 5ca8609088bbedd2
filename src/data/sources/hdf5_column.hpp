// One column of one HDF5 file, read by rows.
#pragma once

#include "base/file.hpp"
#include "data/sources/column_reader.hpp"
#include "data/sources/stored_array.hpp"
#include "hdf5/conversion.hpp"
#include "muster/dataset.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::data {

/// The rows of a column in blocks of the size of a chunk. A block is all chunks that hold the same rows.
struct RowBlocks {
  std::int64_t rows = 0;  ///< of a block
  double count = 0;       ///< of blocks in the column
  double bytes = 0;       ///< of a block, decoded; chunks are whole, also at the edges of the column
  std::size_t slots = 0;  ///< with so many, HDF5 can keep all chunks of two neighbouring blocks at once
};

class Hdf5Column {
 public:
  /// `array`: of at least one dimension.
  Hdf5Column(std::string name, StoredArray array);

  const Column& column() const noexcept { return column_; }
  std::int64_t rows() const noexcept { return rows_; }
  std::int64_t row_bytes() const noexcept { return row_bytes_; }
  /// True if the file must stay open in HDF5.
  bool needs_hdf5() const noexcept { return needs_hdf5_; }
  /// The array through which HDF5 reads the values; null if HDF5 does not read them.
  LibraryArray* library() noexcept { return library_; }
  /// True if a row cannot be read without decoding or converting others: then values are worth keeping.
  bool needs_memory() const noexcept { return needs_memory_; }
  /// The chunks of the column; no rows if it has none.
  const RowBlocks& blocks() const noexcept { return blocks_; }
  /// The memory for all values, decoded, in bytes.
  double all_bytes() const noexcept;

  /// Reads rows in ascending order, each to memory of its own. Thread-safe.
  void read(const File& bytes, std::span<const RowDestination> wanted);
  /// Prepares the chunks of rows in ascending order, if they can be kept. Thread-safe.
  void expect(const File& bytes, std::span<const RowRange> rows, Ahead how);

 private:
  void measure_chunks(const StoredArray& array);

  Column column_;
  std::string shown_;
  hdf5::Conversion conversion_;
  std::int64_t rows_ = 0, row_bytes_ = 0, stored_row_bytes_ = 0;
  bool needs_hdf5_ = true, needs_memory_ = true;
  RowBlocks blocks_;
  LibraryArray* library_ = nullptr;
  std::unique_ptr<ColumnReader> reader_;
};

}  // namespace muster::detail::data
