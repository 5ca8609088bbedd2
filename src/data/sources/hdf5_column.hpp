// One column as it lies in one HDF5 file: checked when it is opened, then read by the row.
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

/// A row that is wanted, and where its values go.
struct Wanted {
  std::int64_t row = 0;
  std::byte* into = nullptr;
};

/// Contiguous, unfiltered, native values are read with preadv from where they lie, without HDF5 and its lock. Anything
/// else (chunked, compressed, of another byte order) is HDF5's to read: whole into memory at first use if `cache()` was
/// called, else by hyperslabs that join a batch's rows, each chunk of a batch once.
class Hdf5Column {
 public:
  /// `name`: path inside the file; `shown`: its name in errors. An Error for what is not a column of numbers, for
  /// values that lie outside the file, beyond its end, or behind a filter that this HDF5 does not have.
  Hdf5Column(hid_t file, const File& bytes, const std::string& name, std::string shown);

  const Column& column() const noexcept { return column_; }
  std::int64_t rows() const noexcept { return rows_; }
  std::int64_t row_bytes() const noexcept { return row_bytes_; }
  /// Whether HDF5 is left out.
  bool direct() const noexcept { return offset_ >= 0; }
  /// From now on it is kept in memory, read whole when it is first asked for. Not for a direct one.
  void cache() noexcept { cached_ = true; }

  /// Reads rows in ascending order. Thread-safe.
  void read(const File& bytes, std::span<const Wanted> wanted);

 private:
  void locate(const File& bytes);
  void read_direct(const File& bytes, std::span<const Wanted> wanted) const;
  void read_selected(std::span<const Wanted> wanted) const;
  void read_whole();

  Column column_;
  std::string shown_;
  hdf5::Handle dataset_, memory_type_;
  std::int64_t rows_ = 0, row_bytes_ = 0;
  std::int64_t offset_ = -1;  ///< of the first value in the file; −1: HDF5 reads
  bool unsigned_ = false;     ///< of 8 bytes: tensors have no such integers, and hold the lower half
  bool cached_ = false;
  std::vector<std::byte> whole_;  ///< the cached values, filled under HDF5's lock
};

}  // namespace muster::detail::data
