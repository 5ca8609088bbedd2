// Writes rows of JSON as lines of CSV (RFC 4180).
#pragma once

#include "base/export.hpp"
#include "muster/json.hpp"

#include <string>
#include <vector>

namespace muster::detail::observe {

/// Adds the keys of `row` that are not in `columns` yet. Returns true if there were any.
MUSTER_INTERNAL_API bool add_columns(std::vector<std::string>& columns, const Json& row);

MUSTER_INTERNAL_API std::string csv_header(const std::vector<std::string>& columns);
/// The field of a column that the row lacks, or has as null, is empty.
MUSTER_INTERNAL_API std::string csv_line(const Json& row, const std::vector<std::string>& columns);

}  // namespace muster::detail::observe
