#include "support/chunk_encoders.hpp"

#include "hdf5/codecs.hpp"

#include <zlib.h>
#ifdef MUSTER_HAS_SZIP
extern "C" {
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
#include <span>
#include <stdexcept>
#include <string>

namespace muster::test {
namespace {

using namespace detail::hdf5;

template <class Byte>
Byte* raw(Bytes& bytes) {
  return reinterpret_cast<Byte*>(bytes.data());
}
template <class Byte>
const Byte* raw(const Bytes& bytes) {
  return reinterpret_cast<const Byte*>(bytes.data());
}

void require(bool condition, const char* codec) {
  if (!condition) throw std::runtime_error(std::string("the encoder of ") + codec + " failed");
}

void append_big_endian(Bytes& to, std::uint64_t number, int bytes) {
  while (bytes-- > 0) to.push_back(static_cast<std::byte>(number >> 8 * bytes));
}
void append(Bytes& to, std::span<const std::byte> bytes) { to.insert(to.end(), bytes.begin(), bytes.end()); }

Bytes shuffled(const Bytes& bytes, std::size_t value_bytes) {
  Bytes result = bytes;
  const auto count = bytes.size() / value_bytes;
  for (std::size_t value = 0; value < count; ++value)
    for (std::size_t byte = 0; byte < value_bytes; ++byte)
      result[byte * count + value] = bytes[value * value_bytes + byte];
  return result;
}

/// Row `bit` of the result has that bit of each value; a multiple of 8 values.
Bytes bit_shuffled(std::span<const std::byte> bytes, std::size_t value_bytes) {
  Bytes result(bytes.size());
  const auto count = bytes.size() / value_bytes;
  for (std::size_t value = 0; value < count; ++value)
    for (std::size_t bit = 0; bit < value_bytes * 8; ++bit)
      if ((bytes[value * value_bytes + bit / 8] >> bit % 8 & std::byte{1}) != std::byte{})
        result[bit * (count / 8) + value / 8] |= std::byte{1} << value % 8;
  return result;
}

#ifdef MUSTER_HAS_LZ4
Bytes lz4(std::span<const std::byte> bytes) {
  Bytes result(static_cast<std::size_t>(LZ4_compressBound(static_cast<int>(bytes.size()))));
  const int size = LZ4_compress_default(reinterpret_cast<const char*>(bytes.data()), raw<char>(result),
                                        static_cast<int>(bytes.size()), static_cast<int>(result.size()));
  require(size > 0, "lz4");
  result.resize(static_cast<std::size_t>(size));
  return result;
}
#endif

#ifdef MUSTER_HAS_ZSTD
Bytes zstd(std::span<const std::byte> bytes) {
  Bytes result(ZSTD_compressBound(bytes.size()));
  const auto size = ZSTD_compress(result.data(), result.size(), bytes.data(), bytes.size(), 3);
  require(ZSTD_isError(size) == 0, "zstd");
  result.resize(size);
  return result;
}
#endif

Bytes bare(unsigned codec, std::span<const std::byte> bytes) {
#ifdef MUSTER_HAS_LZ4
  if (codec == bitshuffle_lz4) return lz4(bytes);
#endif
#ifdef MUSTER_HAS_ZSTD
  if (codec == bitshuffle_zstd) return zstd(bytes);
#endif
  require(codec == bitshuffle_alone, "bitshuffle");
  return {bytes.begin(), bytes.end()};
}

Bytes bitshuffle(const Filter& filter, std::span<const std::byte> bytes) {
  const std::size_t value_bytes = filter.values.at(2), codec = filter.values.at(4);
  std::size_t block = filter.values.at(3);
  if (block == 0) block = std::max<std::size_t>(128, 8192 / value_bytes / 8 * 8);
  Bytes result;
  if (codec != bitshuffle_alone) {
    append_big_endian(result, bytes.size(), 8);
    append_big_endian(result, block * value_bytes, 4);
  }
  for (auto left = bytes.size() / value_bytes; left >= 8;) {
    const auto count = std::min(block, left / 8 * 8);
    const auto stored = bare(static_cast<unsigned>(codec), bit_shuffled(bytes.first(count * value_bytes), value_bytes));
    if (codec != bitshuffle_alone) append_big_endian(result, stored.size(), 4);
    append(result, stored);
    bytes = bytes.subspan(count * value_bytes);
    left -= count;
  }
  append(result, bytes);
  return result;
}

Bytes deflated(const Bytes& bytes) {
  auto size = compressBound(bytes.size());
  Bytes result(size);
  require(compress2(raw<Bytef>(result), &size, raw<Bytef>(bytes), bytes.size(), 4) == Z_OK, "deflate");
  result.resize(size);
  return result;
}

Bytes checked(Bytes bytes) {
  const auto sum = fletcher32(bytes);
  for (int i = 0; i < 4; ++i) bytes.push_back(static_cast<std::byte>(sum >> 8 * i));
  return bytes;
}

#ifdef MUSTER_HAS_SZIP
Bytes szip(const Filter& filter, const Bytes& bytes) {
  SZ_com_t parameters{static_cast<int>(filter.values.at(0)), static_cast<int>(filter.values.at(2)),
                      static_cast<int>(filter.values.at(1)), static_cast<int>(filter.values.at(3))};
  Bytes result(4 + 2 * bytes.size() + 1024);
  for (std::size_t i = 0; i < 4; ++i) result[i] = static_cast<std::byte>(bytes.size() >> 8 * i);
  auto size = result.size() - 4;
  require(SZ_BufftoBuffCompress(result.data() + 4, &size, bytes.data(), bytes.size(), &parameters) == SZ_OK, "szip");
  result.resize(4 + size);
  return result;
}
#endif

#ifdef MUSTER_HAS_LZF
Bytes lzf(const Bytes& bytes) {
  Bytes result(2 * bytes.size() + 64);
  const auto size = lzf_compress(bytes.data(), static_cast<unsigned>(bytes.size()), result.data(),
                                 static_cast<unsigned>(result.size()));
  require(size > 0, "lzf");
  result.resize(size);
  return result;
}
#endif

#ifdef MUSTER_HAS_LZ4
Bytes lz4_blocks(const Filter& filter, std::span<const std::byte> bytes) {
  Bytes result;
  append_big_endian(result, bytes.size(), 8);
  append_big_endian(result, filter.values.at(0), 4);
  while (!bytes.empty()) {
    const auto block = bytes.first(std::min<std::size_t>(filter.values.at(0), bytes.size()));
    const auto stored = lz4(block);
    append_big_endian(result, std::min(stored.size(), block.size()), 4);
    append(result, stored.size() < block.size() ? std::span<const std::byte>(stored) : block);
    bytes = bytes.subspan(block.size());
  }
  return result;
}
#endif

#ifdef MUSTER_HAS_BLOSC
Bytes blosc(const Filter& filter, const Bytes& bytes) {
  const char* codec = nullptr;
  require(blosc_compcode_to_compname(static_cast<int>(filter.values.at(6)), &codec) >= 0, "blosc");
  Bytes result(bytes.size() + BLOSC_MAX_OVERHEAD);
  const int size = blosc_compress_ctx(5, static_cast<int>(filter.values.at(5)), filter.values.at(2), bytes.size(),
                                      bytes.data(), result.data(), result.size(), codec, 0, 1);
  require(size > 0, "blosc");
  result.resize(static_cast<std::size_t>(size));
  return result;
}
#endif

}  // namespace

std::vector<Filter> known_filters(std::size_t value_bytes) {
  const auto size = static_cast<unsigned>(value_bytes);
  std::vector<Filter> filters{{.id = H5Z_FILTER_SHUFFLE, .values = {size}},
                              {.id = H5Z_FILTER_FLETCHER32},
                              {.id = H5Z_FILTER_DEFLATE, .values = {4}}};
#ifdef MUSTER_HAS_SZIP
  for (const unsigned mask : {SZ_NN_OPTION_MASK | SZ_RAW_OPTION_MASK, SZ_EC_OPTION_MASK | SZ_RAW_OPTION_MASK})
    filters.push_back({.id = H5Z_FILTER_SZIP, .values = {mask | SZ_LSB_OPTION_MASK, 8, size * 8, 64}});
#endif
#ifdef MUSTER_HAS_LZF
  filters.push_back({.id = filter_lzf});
#endif
#ifdef MUSTER_HAS_LZ4
  filters.push_back({.id = filter_lz4, .values = {1000}});
  filters.push_back({.id = filter_lz4, .values = {1 << 20}});
  filters.push_back({.id = filter_bitshuffle, .values = {0, 4, size, 64, bitshuffle_lz4}});
#endif
#ifdef MUSTER_HAS_ZSTD
  filters.push_back({.id = filter_zstd, .values = {3}});
  filters.push_back({.id = filter_bitshuffle, .values = {0, 4, size, 0, bitshuffle_zstd}});
#endif
#ifdef MUSTER_HAS_BLOSC
  const char* name = nullptr;
  for (const int codec : {BLOSC_BLOSCLZ, BLOSC_LZ4, BLOSC_ZLIB, BLOSC_ZSTD})
    for (const unsigned order : {BLOSC_NOSHUFFLE, BLOSC_SHUFFLE, BLOSC_BITSHUFFLE})
      if (blosc_compcode_to_compname(codec, &name) >= 0)
        filters.push_back({.id = filter_blosc, .values = {2, 2, size, 0, 5, order, static_cast<unsigned>(codec)}});
#endif
  for (const unsigned block : {0, 24})
    filters.push_back({.id = filter_bitshuffle, .values = {0, 4, size, block, bitshuffle_alone}});
  return filters;
}

Bytes encoded(const Filter& filter, const Bytes& bytes) {
  switch (filter.id) {
    case H5Z_FILTER_SHUFFLE:
      return shuffled(bytes, filter.values.at(0));
    case H5Z_FILTER_FLETCHER32:
      return checked(bytes);
    case H5Z_FILTER_DEFLATE:
      return deflated(bytes);
    case filter_bitshuffle:
      return bitshuffle(filter, bytes);
#ifdef MUSTER_HAS_SZIP
    case H5Z_FILTER_SZIP:
      return szip(filter, bytes);
#endif
#ifdef MUSTER_HAS_LZF
    case filter_lzf:
      return lzf(bytes);
#endif
#ifdef MUSTER_HAS_LZ4
    case filter_lz4:
      return lz4_blocks(filter, bytes);
#endif
#ifdef MUSTER_HAS_ZSTD
    case filter_zstd:
      return zstd(bytes);
#endif
#ifdef MUSTER_HAS_BLOSC
    case filter_blosc:
      return blosc(filter, bytes);
#endif
    default:
      throw std::runtime_error("there is no encoder of filter " + std::to_string(filter.id));
  }
}

Bytes encoded(const std::vector<Filter>& filters, std::uint32_t mask, Bytes bytes) {
  for (std::size_t i = 0; i < filters.size(); ++i)
    if ((mask >> i & 1) == 0) bytes = encoded(filters[i], bytes);
  return bytes;
}

Bytes smooth_values(std::mt19937_64& random, std::size_t count, std::size_t value_bytes) {
  Bytes bytes(count * value_bytes);
  std::uint64_t value = random() % 1000;
  for (std::size_t i = 0; i < count; ++i) {
    if (random() % 4 == 0) value += random() % 16;
    for (std::size_t byte = 0; byte < value_bytes; ++byte)
      bytes[i * value_bytes + byte] = static_cast<std::byte>(byte < 8 ? value >> 8 * byte : 0);
  }
  return bytes;
}

}  // namespace muster::test
