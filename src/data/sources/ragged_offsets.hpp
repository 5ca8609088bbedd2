// The offsets of samples of different length.
#pragma once

#include "base/file.hpp"
#include "data/sources/hdf5_column.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::data {

/// Reads and checks offsets. `column`: a column of `bytes`. `values`: the number of values. `shown`: the column's name
/// in errors. Throws an Error (ExitCode::data) if they are no ascending whole numbers from 0 to `values`, or too many.
std::vector<std::int64_t> read_offsets(Hdf5Column& column, const File& bytes, std::int64_t values,
                                       const std::string& shown);

}  // namespace muster::detail::data
