// A column whose values lie in the file one after the other, in the order that memory has.
#pragma once

#include "data/sources/column_reader.hpp"

#include <cstdint>
#include <string>
#include <utility>

namespace muster::detail::data {

/// Reads the rows from the file straight into their destinations, without HDF5 and its lock.
class ContiguousColumn final : public ColumnReader {
 public:
  /// `offset`: of the first value in the file, in bytes.
  ContiguousColumn(std::uint64_t offset, std::int64_t row_bytes, std::string shown)
      : offset_(offset), row_bytes_(static_cast<std::uint64_t>(row_bytes)), shown_(std::move(shown)) {}

  void read(const File& bytes, std::span<const RowDestination> wanted) override;

 private:
  std::uint64_t offset_, row_bytes_;
  std::string shown_;
};

}  // namespace muster::detail::data
