// A way to read the rows of a column of an HDF5 file.
#pragma once

#include "base/file.hpp"
#include "data/sources/ahead.hpp"

#include <cstddef>
#include <cstdint>
#include <span>

namespace muster::detail::data {

/// A row to read, and the memory that its values go to.
struct RowDestination {
  std::int64_t row = 0;
  std::byte* into = nullptr;
};

/// Rows `first` … `last`.
struct RowRange {
  std::int64_t first = 0, last = 0;
};

class ColumnReader {
 public:
  virtual ~ColumnReader() = default;
  /// Reads rows in ascending order; a row may come several times. `bytes` is the column's file. Thread-safe.
  virtual void read(const File& bytes, std::span<const RowDestination> wanted) = 0;
  /// Prepares to read rows, in ascending order. Thread-safe.
  virtual void expect(const File& /*bytes*/, std::span<const RowRange> /*rows*/, Ahead /*how*/) {}
};

}  // namespace muster::detail::data
