// Recognises samples of different length in a dataset file, for `muster inspect`.
#pragma once

#include "convert/reading.hpp"
#include "muster/json.hpp"

#include <string>
#include <vector>

namespace muster::detail::convert {

/// What Dataset::ragged needs to read a group whose columns have different lengths: {"values": [names], "offsets":
/// name, "columns": [names], "samples": number}. Null if the columns are not values and offsets. `columns`: all of the
/// group. Errors in reading values that may be offsets are added to `advice`.
Json find_ragged(const std::string& path, const std::vector<StoredColumn>& columns, std::vector<std::string>& advice);

/// The C++ call that reads such a group. `ragged`: the result of find_ragged().
std::string ragged_call(const std::string& path, const Json& ragged);

}  // namespace muster::detail::convert
