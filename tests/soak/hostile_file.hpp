// Random HDF5 files that are wrong in some way, and what a user does with a file.
#pragma once

#include <cstdint>
#include <filesystem>

namespace muster::soak {

/// Writes a file with a few datasets of random types, layouts, filters and attributes. Some of them are hostile but
/// whole: parameters of filters that make no sense, chunks that hold something else, absurd sizes. Most files are then
/// damaged: bytes are changed or copied to another place, or the end is cut off. `seed` chooses everything.
void write_hostile_file(std::uint64_t seed, const std::filesystem::path& path);

/// Reads, describes and converts the file in every way that there is; `folder` holds what is written. Returns how many
/// of these calls succeeded. Throws std::logic_error if one throws something else than an Error.
int use_file(std::uint64_t seed, const std::filesystem::path& path, const std::filesystem::path& folder);

}  // namespace muster::soak
