// Makes columns of samples in JSON.
#pragma once

#include "muster/dataset.hpp"
#include "muster/json.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::data {

/// The columns of a list of rows. If the rows are objects, there is one column per key, in the order of names;
/// otherwise there is one column "item". Values are numbers, booleans, or arrays of them, of the same shape in every
/// row. Throws an Error (ExitCode::data) that names the row, counted from `first`, and the key.
std::vector<Batch::Item> columns_of(const Json& rows, const std::string& doing, std::int64_t first = 0);

}  // namespace muster::detail::data
