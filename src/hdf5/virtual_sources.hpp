// The datasets that a virtual dataset is made of.
#pragma once

#include "hdf5/handle.hpp"

#include <string>

namespace muster::detail::hdf5 {

/// Returns the virtual dataset, opened so that HDF5 finds its sources. Throws an Error (ExitCode::data) unless HDF5 can
/// read all of them: where one is missing or too short, HDF5 would silently give the fill value. A source must be a
/// dataset of the same file or of a file in the same folder, and not virtual itself. If the file was opened through a
/// symbolic link, the folder is the link's. If sources are missing there and all are in the folder of the link's
/// target, it is that folder (with HDF5 1.10.2 or newer). `creation`: the dataset's properties.
Handle with_sources(Handle dataset, hid_t creation, const std::string& shown);

}  // namespace muster::detail::hdf5
