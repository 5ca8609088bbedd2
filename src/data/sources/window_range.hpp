// Parts of dimensions, chosen by the values of their coordinates.
#pragma once

#include "data/sources/window_variable.hpp"
#include "muster/dataset.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::data {

/// The values `begin` … `end` − 1 along a dimension.
struct DimensionPart {
  std::size_t dimension = 0;
  std::int64_t begin = 0, end = 0;
};

/// The part of a variable's dimensions, of these names, that an element of WindowOptions::range chooses. `path`: of the
/// variable. The coordinate's file is added to `files` if it is not there.
DimensionPart part_of_dimension(const std::string& path, const std::vector<std::string>& names,
                                const decltype(WindowOptions::range)::value_type& range, OpenFiles& files);

}  // namespace muster::detail::data
