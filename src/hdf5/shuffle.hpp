// The filters that reorder the bytes or the bits of a chunk's values, so that a codec finds more that repeats.
#pragma once

#include <cstddef>
#include <span>

namespace muster::detail::hdf5 {

/// Undoes HDF5's shuffle filter, which has spread the bytes of each value over `value_bytes` planes. Bytes beyond the
/// last whole value are copied. Both spans have the same size and do not overlap; `value_bytes` is above 0.
void unshuffle(std::span<const std::byte> from, std::size_t value_bytes, std::span<std::byte> into);

/// Undoes the bitshuffle filter for one of its blocks: a multiple of 8 values of `value_bytes` bytes, whose bits lie in
/// 8 × `value_bytes` rows. Both spans have the same size and do not overlap.
void bit_unshuffle(std::span<const std::byte> from, std::size_t value_bytes, std::span<std::byte> into);

}  // namespace muster::detail::hdf5
