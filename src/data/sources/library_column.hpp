// A column that HDF5 reads.
#pragma once

#include "data/sources/column_reader.hpp"
#include "data/sources/library_array.hpp"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::data {

/// If the values are not kept in memory, HDF5 reads up to 256 runs of consecutive rows as one selection, so that it
/// seldom decodes a chunk twice in a call.
class LibraryColumn final : public ColumnReader {
 public:
  /// `shape`: of the whole column.
  LibraryColumn(LibraryArray array, std::vector<std::int64_t> shape, std::int64_t row_bytes, std::string shown)
      : array_(std::move(array)), shape_(std::move(shape)), row_bytes_(row_bytes), shown_(std::move(shown)) {}

  LibraryArray& array() noexcept { return array_; }
  void read(const File& bytes, std::span<const RowDestination> wanted) override;

 private:
  void read_selected(std::span<const RowDestination> wanted) const;

  LibraryArray array_;
  std::vector<std::int64_t> shape_;
  std::int64_t row_bytes_;
  std::string shown_;
};

}  // namespace muster::detail::data
