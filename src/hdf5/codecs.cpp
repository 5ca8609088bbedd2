#include "hdf5/codecs.hpp"

#ifdef MUSTER_HAS_LIBDEFLATE
#include <libdeflate.h>
#else
#include <zlib.h>
#endif
#ifdef MUSTER_HAS_SZIP
extern "C" {  // which some releases of the header lack
#include <szlib.h>
}
#endif
#ifdef MUSTER_HAS_LZF
#include <lzf.h>
#endif
#ifdef MUSTER_HAS_LZ4
#include <lz4.h>
#endif
#ifdef MUSTER_HAS_ZSTD
#include <zstd.h>
#endif
#ifdef MUSTER_HAS_BLOSC
#include <blosc.h>
#endif

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string_view>
#include <utility>

namespace muster::detail::hdf5 {
namespace {

using Bytes = std::span<const std::byte>;
using Into = std::span<std::byte>;

#ifdef MUSTER_HAS_LIBDEFLATE
constexpr auto deflate_form = libdeflate_deflate_decompress, zlib_form = libdeflate_zlib_decompress,
               gzip_form = libdeflate_gzip_decompress;

template <auto decompress>
bool inflate(Bytes stored, Into into) {
  struct Free {
    void operator()(libdeflate_decompressor* one) const { libdeflate_free_decompressor(one); }
  };
  thread_local const std::unique_ptr<libdeflate_decompressor, Free> decompressor(libdeflate_alloc_decompressor());
  if (decompressor == nullptr) throw std::bad_alloc();
  return decompress(decompressor.get(), stored.data(), stored.size(), into.data(), into.size(), nullptr) ==
         LIBDEFLATE_SUCCESS;
}
#else
constexpr int deflate_form = -15, zlib_form = 15, gzip_form = 15 + 16;  ///< bits of the window, as zlib takes them

template <int bits>
bool inflate(Bytes stored, Into into) {
  constexpr std::size_t most = std::numeric_limits<uInt>::max();
  z_stream stream{};
  if (stored.size() > most || into.size() > most || ::inflateInit2(&stream, bits) != Z_OK) return false;
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(stored.data()));
  stream.avail_in = static_cast<uInt>(stored.size());
  stream.next_out = reinterpret_cast<Bytef*>(into.data());
  stream.avail_out = static_cast<uInt>(into.size());
  const bool ended = ::inflate(&stream, Z_FINISH) == Z_STREAM_END;
  ::inflateEnd(&stream);
  return ended && stream.avail_out == 0;
}
#endif

bool decode_deflate(const Filter&, Bytes stored, Into into) { return inflate<zlib_form>(stored, into); }

#ifdef MUSTER_HAS_SZIP
/// A stored chunk begins with its decoded size in 4 bytes, the lowest byte first. The output of szip follows.
bool decode_szip(const Filter& filter, Bytes stored, Into into) {
  std::uint32_t size = 0;
  if (stored.size() < sizeof size) return false;
  for (std::size_t i = sizeof size; i-- > 0;) size = size << 8 | std::to_integer<std::uint32_t>(stored[i]);
  SZ_com_t parameters{static_cast<int>(filter.value(0)), static_cast<int>(filter.value(2)),
                      static_cast<int>(filter.value(1)), static_cast<int>(filter.value(3))};
  const int bits = parameters.bits_per_pixel, block = parameters.pixels_per_block;
  // The library does not check these parameters.
  const bool sane = ((bits >= 1 && bits <= 24) || bits == 32 || bits == 64) && block >= 2 && block % 2 == 0 &&
                    block <= SZ_MAX_PIXELS_PER_BLOCK && parameters.pixels_per_scanline >= block &&
                    parameters.pixels_per_scanline <= SZ_MAX_PIXELS_PER_SCANLINE;
  const auto pixel_bytes = static_cast<std::size_t>(bits > 32 ? 8 : bits > 16 ? 4 : bits > 8 ? 2 : 1);
  if (!sane || size != into.size() || into.size() % pixel_bytes != 0) return false;
  auto length = into.size();
  return SZ_BufftoBuffDecompress(into.data(), &length, stored.data() + sizeof size, stored.size() - sizeof size,
                                 &parameters) == SZ_OK &&
         length == into.size();
}
#endif

#ifdef MUSTER_HAS_LZF
bool decode_lzf(const Filter&, Bytes stored, Into into) {
  constexpr std::size_t most = std::numeric_limits<unsigned>::max();
  return stored.size() <= most && into.size() <= most &&
         ::lzf_decompress(stored.data(), static_cast<unsigned>(stored.size()), into.data(),
                          static_cast<unsigned>(into.size())) == into.size();
}
#endif

#ifdef MUSTER_HAS_LZ4
bool decode_lz4_block(Bytes stored, Into into) {
  constexpr std::size_t most = std::numeric_limits<int>::max();
  return stored.size() <= most && into.size() <= most &&
         std::cmp_equal(
             ::LZ4_decompress_safe(reinterpret_cast<const char*>(stored.data()), reinterpret_cast<char*>(into.data()),
                                   static_cast<int>(stored.size()), static_cast<int>(into.size())),
             into.size());
}

/// A stored chunk is its decoded size, the size of a block, and the blocks, each after its stored size. A block that
/// did not become smaller is stored as it is.
bool decode_lz4(const Filter&, Bytes stored, Into into) {
  if (stored.size() < 12 || big_endian64(stored) != into.size()) return false;
  const std::size_t block = big_endian32(stored.subspan(8));
  if (block == 0) return false;
  for (stored = stored.subspan(12); !into.empty();) {
    if (stored.size() < 4) return false;
    const std::size_t size = big_endian32(stored), length = std::min(block, into.size());
    stored = stored.subspan(4);
    if (size > stored.size()) return false;
    if (size == length)
      std::memcpy(into.data(), stored.data(), size);
    else if (!decode_lz4_block(stored.first(size), into.first(length)))
      return false;
    stored = stored.subspan(size);
    into = into.subspan(length);
  }
  return true;
}
#endif

#ifdef MUSTER_HAS_ZSTD
bool decode_zstd_frame(Bytes stored, Into into) {
  struct Free {
    void operator()(ZSTD_DCtx* one) const { ::ZSTD_freeDCtx(one); }
  };
  thread_local const std::unique_ptr<ZSTD_DCtx, Free> context(::ZSTD_createDCtx());
  if (context == nullptr) throw std::bad_alloc();
  return ::ZSTD_decompressDCtx(context.get(), into.data(), into.size(), stored.data(), stored.size()) == into.size();
}

bool decode_zstd(const Filter&, Bytes stored, Into into) { return decode_zstd_frame(stored, into); }
#endif

#ifdef MUSTER_HAS_BLOSC
bool decode_blosc_frame(Bytes stored, Into into) {
  std::size_t size = 0;
  return ::blosc_cbuffer_validate(stored.data(), stored.size(), &size) == 0 && size == into.size() &&
         std::cmp_equal(::blosc_decompress_ctx(stored.data(), into.data(), into.size(), 1), into.size());
}

bool decode_blosc(const Filter&, Bytes stored, Into into) { return decode_blosc_frame(stored, into); }
#endif

}  // namespace

BareDecoder bare_decoder(const std::string& codec) {
  if (codec == "deflate") return inflate<deflate_form>;
  if (codec == "zlib") return inflate<zlib_form>;
  if (codec == "gzip") return inflate<gzip_form>;
#ifdef MUSTER_HAS_LZ4
  if (codec == "lz4") return decode_lz4_block;
#endif
#ifdef MUSTER_HAS_ZSTD
  if (codec == "zstd") return decode_zstd_frame;
#endif
#ifdef MUSTER_HAS_BLOSC
  constexpr std::string_view blosc = "blosc ";
  if (codec.starts_with(blosc) && ::blosc_compname_to_compcode(codec.c_str() + blosc.size()) >= 0)
    return decode_blosc_frame;
#endif
  return nullptr;
}

Decoder decoder_of(const Filter& filter) {
  if (filter.id == H5Z_FILTER_DEFLATE) return decode_deflate;
#ifdef MUSTER_HAS_SZIP
  if (filter.id == H5Z_FILTER_SZIP) return decode_szip;
#endif
#ifdef MUSTER_HAS_LZF
  if (filter.id == filter_lzf) return decode_lzf;
#endif
#ifdef MUSTER_HAS_LZ4
  if (filter.id == filter_lz4) return decode_lz4;
#endif
#ifdef MUSTER_HAS_ZSTD
  if (filter.id == filter_zstd) return decode_zstd;
#endif
#ifdef MUSTER_HAS_BLOSC
  if (filter.id == filter_blosc) return decode_blosc;
#endif
  if (filter.id != filter_bitshuffle) return nullptr;
  const auto codec = filter.value(bitshuffle_codec);
  const bool has_codec = codec == bitshuffle_alone || (codec == bitshuffle_lz4 && bare_decoder("lz4") != nullptr) ||
                         (codec == bitshuffle_zstd && bare_decoder("zstd") != nullptr);
  return has_codec ? decode_bitshuffle : nullptr;
}

const char* package_of(const Filter& filter) {
  const auto codec = filter.id == filter_bitshuffle ? filter.value(bitshuffle_codec) : 0;
  if (filter.id == H5Z_FILTER_SZIP) return "libaec-dev";
  if (filter.id == filter_lzf) return "liblzf-dev";
  if (filter.id == filter_blosc) return "libblosc-dev";
  if (filter.id == filter_lz4 || codec == bitshuffle_lz4) return "liblz4-dev";
  if (filter.id == filter_zstd || codec == bitshuffle_zstd) return "libzstd-dev";
  return nullptr;
}

std::uint32_t big_endian32(std::span<const std::byte> from) noexcept {
  std::uint32_t number = 0;
  for (std::size_t i = 0; i < sizeof number; ++i) number = number << 8 | std::to_integer<std::uint32_t>(from[i]);
  return number;
}

std::uint64_t big_endian64(std::span<const std::byte> from) noexcept {
  return std::uint64_t{big_endian32(from)} << 32 | big_endian32(from.subspan(4));
}

std::uint32_t fletcher32(std::span<const std::byte> bytes) {
  // Sums of 16-bit words, the higher byte first, modulo 65535. Such a sum is 65535 instead of 0 unless all words are 0.
  constexpr std::size_t words_at_once = 360;  // the sums of so many fit 32 bits
  std::uint32_t first = 0, second = 0;
  const auto fold = [](std::uint32_t sum) { return (sum & 0xffff) + (sum >> 16); };
  const auto add = [&](std::uint32_t word) { second += first += word; };
  for (auto words = bytes.size() / 2; words > 0;) {
    const auto count = std::min(words, words_at_once);
    for (std::size_t i = 0; i < count; ++i)
      add(std::to_integer<std::uint32_t>(bytes[2 * i]) << 8 | std::to_integer<std::uint32_t>(bytes[2 * i + 1]));
    bytes = bytes.subspan(2 * count);
    words -= count;
    first = fold(first), second = fold(second);
  }
  if (!bytes.empty()) {
    add(std::to_integer<std::uint32_t>(bytes.front()) << 8);
    first = fold(first), second = fold(second);
  }
  return fold(second) << 16 | fold(first);
}

}  // namespace muster::detail::hdf5
