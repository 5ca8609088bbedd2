// The header of a .npy file, which arrays in .npz archives have too.
#pragma once

#include "convert/convert.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::convert {

struct NpyHeader {
  std::string descr;  ///< the type, such as "<f4"
  bool fortran_order = false;
  std::vector<std::uint64_t> shape;  ///< empty for a single value
};

/// Reads the header, with which `file` begins. Throws an Error if it is not one.
NpyHeader read_npy_header(InputFile& file);

/// The column whose values follow the header in `file`. Throws an Error for values that no column can have.
InputColumn npy_column(const NpyHeader& header, InputFile file);

}  // namespace muster::detail::convert
