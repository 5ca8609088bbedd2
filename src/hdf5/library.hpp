// Which HDF5 this is. loaded_version() and is_thread_safe() take HDF5's lock.
#pragma once

#include "base/export.hpp"

#include <string>

namespace muster::detail::hdf5 {

/// The versions of the library that is loaded, and of the headers with which muster was compiled: "1.10.8".
MUSTER_INTERNAL_API std::string loaded_version();
MUSTER_INTERNAL_API std::string compiled_version();
/// True if muster was compiled with a parallel HDF5.
MUSTER_INTERNAL_API bool is_parallel();
MUSTER_INTERNAL_API bool is_thread_safe();

}  // namespace muster::detail::hdf5
