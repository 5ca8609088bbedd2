// One column of one HDF5 file. It is checked when it is opened, and then read by rows.
#pragma once

#include "base/file.hpp"
#include "hdf5/handle.hpp"
#include "muster/dataset.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::data {

/// A row to read, and the memory that its values go to.
struct RowDestination {
  std::int64_t row = 0;
  std::byte* into = nullptr;
};

/// Contiguous, unfiltered values in native byte order are read directly with preadv, without HDF5 and its lock.
/// Anything else (chunked, compressed, in another byte order) is read by HDF5. If cache() was called, HDF5 reads the
/// whole column into memory at first use; otherwise it reads a batch's rows as one selection, so that it decodes each
/// chunk once per batch.
class Hdf5Column {
 public:
  /// `name`: path inside the file; `shown`: its name in errors. Throws an Error if it is not a column of numbers, or if
  /// its values lie outside of the file, lie beyond its end, or need a filter that this HDF5 does not have.
  Hdf5Column(hid_t file, const File& bytes, const std::string& name, std::string shown);

  const Column& column() const noexcept { return column_; }
  std::int64_t rows() const noexcept { return rows_; }
  std::int64_t row_bytes() const noexcept { return row_bytes_; }
  /// True if the values are read with preadv, without HDF5.
  bool is_direct() const noexcept { return offset_ >= 0; }
  /// Keeps the whole column in memory from the first read on. Only for a column that is not is_direct().
  void cache() noexcept { cached_ = true; }
  bool is_cached() const noexcept { return cached_; }
  /// Rows of a chunk of the file; 0 if the column is not chunked.
  std::int64_t chunk_rows() const noexcept { return chunk_rows_; }
  /// Bytes of all chunks, decoded, that hold chunk_rows() rows. Chunks are whole, also at the edges of the column.
  double block_bytes() const noexcept { return block_bytes_; }
  /// Has HDF5 keep decoded chunks, up to so many bytes. `group`: that of the column, in its file.
  void keep_chunks(hid_t group, std::int64_t bytes);

  /// Reads rows in ascending order. Thread-safe.
  void read(const File& bytes, std::span<const RowDestination> wanted);

 private:
  void locate(const File& bytes);
  void measure_chunks(hid_t creation);
  void read_direct(const File& bytes, std::span<const RowDestination> wanted) const;
  void read_selected(std::span<const RowDestination> wanted) const;
  void read_whole();

  Column column_;
  std::string shown_;
  hdf5::Handle dataset_, memory_type_;
  std::int64_t rows_ = 0, row_bytes_ = 0, chunk_rows_ = 0;
  double block_bytes_ = 0;  ///< a file may claim chunks larger than 64 bits can count
  std::size_t chunk_slots_ = 0;
  std::int64_t offset_ = -1;  ///< file offset of the first value, in bytes; −1 if HDF5 reads
  bool unsigned_ = false;     ///< stored as uint64, which tensors do not have: values above 2^63 − 1 are an Error
  bool cached_ = false;
  std::vector<std::byte> whole_;  ///< the cached values, filled under HDF5's lock
};

}  // namespace muster::detail::data
