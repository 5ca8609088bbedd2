// The datasets that a virtual dataset is made of.
#pragma once

#include "hdf5/handle.hpp"

#include <string>

namespace muster::detail::hdf5 {

/// Throws an Error (ExitCode::data) unless HDF5 can read all sources of a virtual dataset: where one is missing or too
/// short, HDF5 gives the fill value without a word. A source is a dataset of the same file or of a file in the same
/// folder, and not virtual itself. `creation`: the dataset's properties.
void require_virtual_sources(hid_t dataset, hid_t creation, const std::string& shown);

}  // namespace muster::detail::hdf5
