// Filters of chunked datasets: adds the filters with which muster writes, names the filters in a file, and finds out
// whether HDF5 has them.
#pragma once

#include "base/export.hpp"
#include "hdf5/handle.hpp"

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::hdf5 {

struct Filter {
  H5Z_filter_t id = 0;
  std::string name = {};              ///< as the file has it; may be empty
  std::vector<unsigned> values = {};  ///< its parameters, whose meaning the filter defines

  /// Parameter `i`, or 0 if there are fewer.
  unsigned value(std::size_t i) const noexcept { return i < values.size() ? values[i] : 0; }
  /// "deflate 9", "shuffle", "checksum" …
  MUSTER_INTERNAL_API std::string text() const;
};

/// Returns the filters in a dataset's creation properties.
MUSTER_INTERNAL_API std::vector<Filter> filters(hid_t creation, std::string_view doing);

/// The first filter that this HDF5 does not have; null if it has all.
MUSTER_INTERNAL_API const Filter* missing_filter(const std::vector<Filter>& filters);
/// Throws an Error (ExitCode::data) if this HDF5 lacks one of the filters.
MUSTER_INTERNAL_API void require_filters(const std::vector<Filter>& filters, std::string_view doing);

/// Adds deflate of that level to a new dataset's creation properties; values of several bytes are shuffled first.
MUSTER_INTERNAL_API void compress(hid_t creation, hid_t type, int level, std::string_view doing);

}  // namespace muster::detail::hdf5
