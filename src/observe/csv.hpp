// Writes rows of JSON as lines of CSV, quoted as in RFC 4180.
#pragma once

#include "base/export.hpp"
#include "muster/json.hpp"

#include <string>
#include <vector>

namespace muster::detail::observe {

/// Appends the keys of `row` that `columns` does not have yet. Returns true if there were any.
MUSTER_INTERNAL_API bool add_columns(std::vector<std::string>& columns, const Json& row);

MUSTER_INTERNAL_API std::string csv_header(const std::vector<std::string>& columns);
/// Returns the row as a line. A column that the row does not have, or has as null, becomes an empty field.
MUSTER_INTERNAL_API std::string csv_line(const Json& row, const std::vector<std::string>& columns);

}  // namespace muster::detail::observe
