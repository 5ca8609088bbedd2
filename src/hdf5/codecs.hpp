// Decoders of the filters that compress, each built if its library was found (scripts/cmake/MusterDependencies.cmake).
// All may be given the bytes of a damaged or hostile file.
#pragma once

#include "base/export.hpp"
#include "hdf5/filters.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace muster::detail::hdf5 {

/// Numbers of filters that HDF5 itself does not have, as The HDF Group has registered them.
enum RegisteredFilter : H5Z_filter_t {
  filter_lzf = 32000,
  filter_blosc = 32001,
  filter_lz4 = 32004,
  filter_bitshuffle = 32008,
  filter_zstd = 32015,
};

/// Decodes `stored` into `into`. False if the result does not have exactly the size of `into`, or if `stored` is
/// damaged. Thread-safe.
using Decoder = bool (*)(const Filter& filter, std::span<const std::byte> stored, std::span<std::byte> into);

/// The decoder of a filter that compresses. Null for all other filters, and if the decoder was not built.
MUSTER_INTERNAL_API Decoder decoder_of(const Filter& filter);
/// The package of Debian with which decoder_of(filter) would be built; null if no package brings it.
MUSTER_INTERNAL_API const char* package_of(const Filter& filter);

/// Like a Decoder, for a codec without parameters.
using BareDecoder = bool (*)(std::span<const std::byte> stored, std::span<std::byte> into);
/// The decoder of "deflate" without a frame, "zlib" or "gzip" (deflate in their frames), "lz4" (one block), "zstd", or
/// "blosc CODEC". Null for another name, and if the decoder was not built.
BareDecoder bare_decoder(const std::string& codec);

/// Undoes the bitshuffle filter, and lz4 or zstd if one of them was applied after it.
bool decode_bitshuffle(const Filter& filter, std::span<const std::byte> stored, std::span<std::byte> into);
/// The codec of a bitshuffle filter: its parameter 4, counted from 0.
enum BitshuffleCodec : unsigned { bitshuffle_alone = 0, bitshuffle_lz4 = 2, bitshuffle_zstd = 3 };
constexpr std::size_t bitshuffle_codec = 4;

/// Reads a number that is stored with its highest byte first. `from` has at least as many bytes as the number.
std::uint32_t big_endian32(std::span<const std::byte> from) noexcept;
std::uint64_t big_endian64(std::span<const std::byte> from) noexcept;

/// The checksum that HDF5's filter fletcher32 stores.
std::uint32_t fletcher32(std::span<const std::byte> bytes);

}  // namespace muster::detail::hdf5
