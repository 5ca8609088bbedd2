// Files that are written past the system's cache, as large ones are quickest to be on the disk.
#pragma once

#include "base/file.hpp"

#include <cstddef>
#include <cstdint>

namespace muster::detail {

/// No file system asks for more: of what write_directly() concerns.
inline constexpr std::size_t direct_alignment = 4096;

/// Makes an empty file as long as that and takes the space for it, where the file system can: a full disk is an Error
/// (ExitCode::retry) now, and not in the middle of writing.
void allocate(File& file, std::uint64_t size);

/// Has File::write_at() go past the system's cache where the file system takes that: offsets, lengths and memory are
/// multiples of direct_alignment from here on; a write that is not goes through the cache, with all that follow.
void write_directly(File& file) noexcept;
/// No more.
void write_through_cache(int descriptor) noexcept;

}  // namespace muster::detail
