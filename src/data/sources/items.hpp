// Samples as JSON, and the columns that they make.
#pragma once

#include "muster/dataset.hpp"
#include "muster/json.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::data {

/// The columns of a list of rows: of objects one for each key, in the order of names; of anything else one that is
/// called "item". Values are numbers, booleans, or arrays of them, of the same shape in every row. An Error
/// (ExitCode::data) names the row, counted from `first` on, and the key.
std::vector<Batch::Item> columns_of(const Json& rows, const std::string& doing, std::int64_t first = 0);

}  // namespace muster::detail::data
