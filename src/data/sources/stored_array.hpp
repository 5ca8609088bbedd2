// An array of an HDF5 file: what its values are, and in which way they are read.
#pragma once

#include "base/file.hpp"
#include "data/sources/chunk_reader.hpp"
#include "data/sources/library_array.hpp"
#include "hdf5/conversion.hpp"
#include "hdf5/handle.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::data {

/// Values are read as they are stored, in one of three ways, and then converted. Contiguous ones and chunks whose
/// filters are known here are read without HDF5 and its lock. HDF5 reads the others.
struct StoredArray {
  std::string shown;  ///< its name in errors
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> chunk = {};  ///< the shape of a chunk; empty if the values are not in chunks
  std::vector<std::string> dimensions;   ///< the names of the dimensions, as of hdf5::dimension_names()
  hdf5::Conversion conversion;

  std::optional<std::uint64_t> offset = {};     ///< of contiguous values: that of the first one in the file, in bytes
  std::unique_ptr<ChunkReader> chunks = {};     ///< if chunks are decoded here
  hdf5::Handle dataset = {}, memory_type = {};  ///< if HDF5 reads, as values of this type
  std::size_t record_bytes = 0;                 ///< of a value in a decoded chunk, with all fields of a compound

  /// Returns the array through which HDF5 reads the values; it takes the handles above.
  LibraryArray library();
  /// The strides of the array and of a chunk, in bytes as stored.
  std::vector<std::size_t> strides() const;
  std::vector<std::size_t> chunk_strides() const;
  /// How many slots HDF5's table of kept chunks needs for neighbouring chunks to have separate slots; at most 2^20.
  std::size_t chunk_slots() const;
};

/// The strides of an array whose values follow one another, in bytes.
std::vector<std::size_t> strides_of(const std::vector<std::int64_t>& shape, std::size_t value_bytes);

/// Opens the dataset `name` of a file; DATASET.FIELD is a field of compound values. `decoding` outlives the result.
/// Throws an Error if it holds no array of numbers, or if its values lie outside of the file, lie beyond its end, or
/// need a filter that is not there.
StoredArray open_array(hid_t file, const File& bytes, const std::string& name, std::string shown,
                       ChunkDecoding& decoding);

}  // namespace muster::detail::data
