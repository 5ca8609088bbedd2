// The chunks of an array of a Zarr store.
#pragma once

#include "hdf5/foreign_chunks.hpp"
#include "zarr/metadata.hpp"
#include "zarr/store_files.hpp"

#include <memory>
#include <string>

namespace muster::detail::zarr {

/// `folder`: of the array, empty or with a slash at its end. `metadata_text`: for the fingerprint.
std::shared_ptr<const hdf5::ForeignChunks> chunks_of(std::shared_ptr<const StoreFiles> files, std::string folder,
                                                     ArrayMetadata metadata, std::string shown,
                                                     const std::string& metadata_text);

}  // namespace muster::detail::zarr
