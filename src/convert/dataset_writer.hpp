// Writes one dataset file, which appears complete or not at all.
#pragma once

#include "convert/dimensions.hpp"
#include "hdf5/handle.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::convert {

/// Write the columns one after the other, each in the order of its samples; then call finish() and put_in_place(). The
/// destructor removes the file if that has not been done. If several files belong together, finish all of them
/// before the first is put in place. Errors of writing have ExitCode::retry. Each write is checked, since HDF5 may
/// close a file without an error after a write has failed.
class DatasetWriter {
 public:
  /// Makes a file with a temporary name beside `output`. `aligned`: columns of a page (4096 bytes) or more start at
  /// page boundaries, for reading without HDF5.
  DatasetWriter(std::filesystem::path output, bool aligned);
  DatasetWriter(const DatasetWriter&) = delete;
  DatasetWriter& operator=(const DatasetWriter&) = delete;
  ~DatasetWriter();

  /// Begins a column of the HDF5 type `stored`. `shape` begins with the number of samples. The column is contiguous, or
  /// in chunks of `chunk` samples; with `compress` it is deflated at that level.
  void begin_column(const std::string& name, hid_t stored, const std::vector<std::int64_t>& shape,
                    std::optional<std::int64_t> chunk, std::optional<int> compress);
  /// Copies the attributes of a dataset to the column, except those about its dimensions. Warns of each that is not
  /// Attribute::is_simple(), and leaves it out. `shown`: the dataset's name in errors.
  void copy_attributes(hid_t from, const std::string& shown);
  /// Writes the next `count` samples, with values of type `value_type`. In a chunked column all calls but the last must
  /// write whole chunks.
  void write(std::span<const std::byte> values, std::int64_t count, hid_t value_type);
  void end_column();
  /// Called when all columns are written: names their dimensions.
  void name_dimensions(const std::vector<ColumnDimensions>& columns);

  /// Makes the file durable, under its temporary name.
  void finish();
  /// Gives the file the name output(), replacing a file of that name.
  void put_in_place();

  const std::filesystem::path& output() const noexcept { return output_; }

 private:
  std::string doing() const { return "writing " + output_.string(); }
  std::int64_t check(std::int64_t status) const { return hdf5::check(status, doing(), ExitCode::retry); }

  std::filesystem::path output_;
  std::filesystem::path temporary_;  ///< the temporary name; empty once the file is in place
  hdf5::Handle file_;
  hdf5::Handle column_;
  std::int64_t next_ = 0;  ///< index of the column's next sample
};

}  // namespace muster::detail::convert
