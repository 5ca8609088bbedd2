// Reads a chunked dataset through a ChunkIndex and a FilterPipeline, slowly and plainly.
#pragma once

#include "base/file.hpp"

#include <hdf5.h>

#include <cstddef>
#include <string>
#include <vector>

namespace muster::test {

/// The bytes of all values of dataset `name`; `fill` is in those of chunks that were never written. `file`: from
/// open_file(), `bytes`: the same file. Throws std::runtime_error if HDF5 would have to read it.
std::vector<std::byte> read_chunks(hid_t file, const detail::File& bytes, const std::string& name, std::byte fill = {});

}  // namespace muster::test
