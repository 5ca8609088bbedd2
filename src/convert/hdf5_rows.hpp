// Reads the rows of one column of an HDF5 file in any layout and any order, with little memory.
#pragma once

#include "base/file.hpp"
#include "data/sources/chunk_layout.hpp"
#include "data/sources/chunk_reader.hpp"
#include "hdf5/file.hpp"
#include "hdf5/filter_pipeline.hpp"
#include "hdf5/handle.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::convert {

/// A group of an HDF5 file, opened twice: by HDF5, and as bytes.
struct Hdf5Group {
  explicit Hdf5Group(const std::string& text);

  hdf5::GroupPath place;
  hdf5::Handle file, group;
  File bytes;
};

/// True if `name` is a group; false for a link without a target.
bool is_group(hid_t parent, const std::string& name);

/// Rows are read in pieces: about a megabyte, or all chunks that hold the same rows. The last piece is kept, so that
/// rows in ascending order decode each chunk once. A piece is larger than `most_piece_bytes` only if a single chunk or
/// row is larger. If the chunks that hold the same rows are larger than that together, every piece decodes them again.
/// For a field of compound values, pieces hold whole values.
class Hdf5Rows {
 public:
  static constexpr std::int64_t most_piece_bytes = 64 << 20;

  /// Throws an Error if `name` is not a column of numbers, or cannot be read. It may be a field, as in "points.x".
  Hdf5Rows(std::shared_ptr<const Hdf5Group> group, const std::string& name);

  const std::string& shown() const noexcept { return shown_; }
  /// Begins with the number of rows.
  const std::vector<std::int64_t>& shape() const noexcept { return shape_; }
  std::size_t row_bytes() const noexcept { return static_cast<std::size_t>(row_bytes_ / record_bytes_ * value_bytes_); }
  std::size_t value_bytes() const noexcept { return static_cast<std::size_t>(value_bytes_); }
  /// The type of the values that read() gives.
  hdf5::Handle stored_type() const;
  /// The same type in this machine's byte order; of an enumeration, that of its integers.
  hdf5::Handle memory_type() const;
  bool holds_whole_numbers() const noexcept { return whole_numbers_; }
  hid_t dataset() const noexcept { return dataset_.get(); }

  /// Reads rows in any order. Calls `between` from time to time.
  void read(std::span<const std::int64_t> rows, std::span<std::byte> into, const std::function<void()>& between);
  void read(std::int64_t first, std::int64_t count, std::span<std::byte> into);

 private:
  /// Chunks that are decoded without HDF5, which may lack their filters.
  struct Chunks {
    std::unique_ptr<data::ChunkReader> reader;
    data::ChunkLayout layout;
  };

  /// The type of a record, that is a value in the file. For a field, a compound with this field alone, at its offset.
  hdf5::Handle record_type() const;
  void choose_field(const std::string& field);
  void check_shape();
  void choose_pieces();
  bool is_sparse(std::size_t wanted_rows) const noexcept;
  /// Returns the address of the row in the kept piece. Loads the row's piece first if another one is kept.
  const std::byte* row_in_piece(std::int64_t row);
  void read_records(std::span<const std::int64_t> rows, std::span<std::byte> into,
                    const std::function<void()>& between);
  void read_records(std::int64_t first, std::int64_t count, std::span<std::byte> into);
  void take_field(std::span<const std::byte> records, std::span<std::byte> into) const;
  void load(std::int64_t first, std::int64_t count, std::span<std::byte> into);
  void load_by_hdf5(std::int64_t first, std::int64_t count, std::span<std::byte> into) const;

  std::shared_ptr<const Hdf5Group> group_;
  std::string shown_;
  hdf5::Handle dataset_;
  std::vector<std::int64_t> shape_;
  hdf5::Handle field_type_, only_field_;  ///< none if the column is no field; the second is for record_type()
  std::size_t field_offset_ = 0;          ///< in a record, in bytes
  /// Bytes of a value of the column, of a record (the value, or the compound that it is a field of), and of a row of
  /// records.
  std::int64_t value_bytes_ = 0, record_bytes_ = 0, row_bytes_ = 0;
  std::int64_t piece_rows_ = 1;
  bool whole_numbers_ = false;
  bool rows_alone_ = true;  ///< true if a row can be read without decoding its neighbours, too
  data::ChunkDecoding decoding_{/*cache_bytes=*/0, [] { return 0; }};
  std::optional<Chunks> chunks_;
  hdf5::Buffer piece_, records_;
  std::int64_t first_kept_ = 0, kept_rows_ = 0;
};

}  // namespace muster::detail::convert
