// How training reads a column of an HDF5 file, and what to do where that is slow.
#pragma once

#include "hdf5/filters.hpp"
#include "hdf5/handle.hpp"
#include "muster/json.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::convert {

/// A column as it lies in its file.
struct StoredColumn {
  std::string name;
  std::vector<std::int64_t> shape;  ///< begins with the number of samples
  std::vector<std::int64_t> chunk;  ///< empty if it has no chunks
  std::vector<hdf5::Filter> filters;
  bool is_foreign = false;  ///< its chunks are those of a Zarr store
  bool is_whole = true;     ///< none of its chunks is missing
  std::int64_t value_bytes = 0;
  std::int64_t bytes = 0;       ///< of all values, decoded
  std::int64_t file_bytes = 0;  ///< as stored
};

enum class Reader {
  direct,   ///< muster reads the rows where they lie in the file
  decoded,  ///< muster decodes the chunks, without HDF5's lock
  hdf5,     ///< HDF5 reads the rows, under its lock
};
const char* name_of(Reader reader) noexcept;

struct Reading {
  Reader reader = Reader::direct;
  std::string problem;       ///< why HDF5 reads it, and the remedy; empty if there is nothing to do
  bool can_improve = false;  ///< writing it again in another layout gives it a better reader
  bool can_convert = true;   ///< `muster convert h5` can read it
};
/// `dataset`: the column's, of a file that zarr::open_file() has opened.
Reading reading_of(const StoredColumn& column, hid_t dataset, const std::string& shown);

/// The place of the column's values in the file, in bytes; null unless they are contiguous and read directly.
Json offset_of(const StoredColumn& column, const Reading& reading, hid_t dataset);

/// What slows down the reading of the column's chunks, as texts: large chunks, and samples that are spread over
/// several.
std::vector<std::string> chunk_problems(const StoredColumn& column, const Reading& reading);

/// A layout in which the columns are read faster.
struct BetterLayout {
  std::optional<std::int64_t> chunk;  ///< samples; empty: contiguous
  std::optional<int> compress;        ///< level of deflate
};
/// None if no layout helps.
std::optional<BetterLayout> better_layout(const std::vector<StoredColumn>& columns,
                                          const std::vector<Reading>& readings);

}  // namespace muster::detail::convert
