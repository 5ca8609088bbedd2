// A column that HDF5 reads.
#pragma once

#include "data/sources/column_reader.hpp"
#include "hdf5/handle.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::data {

/// For values that HDF5 must convert or decode. After keep_in_memory(), HDF5 reads the whole column at the first read;
/// otherwise it reads the rows of a call as one selection, so that it decodes each chunk once per call.
class LibraryColumn final : public ColumnReader {
 public:
  /// `shape`: of the whole column.
  LibraryColumn(hdf5::Handle dataset, hdf5::Handle memory_type, std::vector<std::int64_t> shape, std::int64_t row_bytes,
                std::string shown);

  void keep_in_memory() noexcept { is_kept_ = true; }
  /// Has HDF5 keep decoded chunks, up to so many bytes, with `slots` entries in its table. `file`: any object of the
  /// column's file.
  void keep_chunks(hid_t file, std::size_t slots, std::size_t bytes);
  void read(const File& bytes, std::span<const RowDestination> wanted) override;

 private:
  void read_whole();
  void read_selected(std::span<const RowDestination> wanted) const;

  hdf5::Handle dataset_, memory_type_;
  std::vector<std::int64_t> shape_;
  std::int64_t row_bytes_;
  std::string shown_;
  bool is_kept_ = false;
  std::vector<std::byte> whole_;  ///< the values if they are kept, filled under HDF5's lock
};

}  // namespace muster::detail::data
