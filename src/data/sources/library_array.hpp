// An array that HDF5 reads.
#pragma once

#include "hdf5/handle.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::data {

/// For values that HDF5 must convert or decode. Members are called under HDF5's lock.
class LibraryArray {
 public:
  /// `memory_type`: the type to which HDF5 converts the values. `value_bytes`: the size of a value of this type.
  LibraryArray(hdf5::Handle dataset, hdf5::Handle memory_type, std::vector<std::int64_t> shape, std::size_t value_bytes,
               std::string shown);

  /// Lets whole() read all values once and keep them; does nothing for an array without values.
  void keep_in_memory() noexcept;
  /// Closes the dataset until keep_chunks(). If two arrays are fields of one dataset, close both before: while one has
  /// it open, HDF5 does not change how many chunks it keeps.
  void close();
  /// Has HDF5 keep decoded chunks, up to so many bytes, with `slots` entries in its table. `file`: any object of the
  /// array's file.
  void keep_chunks(hid_t file, std::size_t slots, std::size_t bytes);

  /// All values, or null if they are not kept.
  const std::byte* whole();
  /// A selection of all values, to be narrowed down and then read.
  hdf5::Handle space() const;
  /// Reads the selected values to `into`, one after the other, as an array of this shape.
  void read(hid_t space, const std::vector<std::int64_t>& shape, std::byte* into) const;

 private:
  hdf5::Handle dataset_, memory_type_;
  std::vector<std::int64_t> shape_;
  std::size_t value_bytes_;
  std::string shown_;
  std::string name_;  ///< in its file, while the dataset is closed
  bool is_kept_ = false;
  std::vector<std::byte> whole_;
};

}  // namespace muster::detail::data
