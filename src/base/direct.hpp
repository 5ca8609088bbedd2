// Direct I/O, which bypasses the page cache: the fastest way to write large files to the disk, and to read files that
// are too large for the cache.
#pragma once

#include "base/file.hpp"

#include <cstddef>
#include <cstdint>

namespace muster::detail {

/// The alignment in bytes for direct I/O. Common file systems need no more; one that does fails with EINVAL.
inline constexpr std::size_t direct_alignment = 4096;

/// Makes an empty file `size` bytes long and reserves the disk space if the file system can, so that a full disk is an
/// Error (ExitCode::retry) now and not in the middle of writing.
void allocate(File& file, std::uint64_t size);

/// Makes File::write_at() bypass the page cache if the file system supports that. Offsets, lengths and addresses must
/// be multiples of direct_alignment from then on. A write that the file system refuses goes through the cache, as do
/// all later ones.
void write_directly(File& file) noexcept;
/// Ends write_directly().
void write_through_cache(int descriptor) noexcept;

/// Makes reads of the file's descriptor bypass the page cache, with the same alignment. False if the file system
/// refuses. Some file systems accept this call and then fail the reads with EINVAL.
bool read_directly(File& file) noexcept;

}  // namespace muster::detail
