// The driver of HDF5's file layer through which files are read. It can note where values lie instead of reading them:
// that is how a ChunkIndex finds chunks, since HDF5 1.10 has no quick call for it.
#pragma once

#include <hdf5.h>

#include <cstdint>

namespace muster::detail::hdf5 {

/// Reads of values, as opposed to metadata: how many there were, and the last one.
struct RawReads {
  int count = 0;
  std::uint64_t offset = 0;  ///< in bytes from the beginning of the file, also if the file begins with a user block
  std::uint64_t bytes = 0;
};

/// What the driver knows of an open file.
struct OpenForReading {
  std::uint64_t bytes = 0;    ///< the size of the file when it was opened
  RawReads* noted = nullptr;  ///< if set, reads of values are noted here and succeed without reading
};

/// Makes HDF5 read the file that is opened with the access properties `access` through this driver.
void set_read_driver(hid_t access);

/// The record of the file that `object` belongs to, valid while the file is open. Null if another driver reads it.
OpenForReading* open_for_reading(hid_t object);

}  // namespace muster::detail::hdf5
