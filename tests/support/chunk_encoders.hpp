// What the filters of HDF5 store, made by the codecs' own libraries and, for what has none, by loops over bytes and
// bits.
#pragma once

#include "hdf5/filters.hpp"

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace muster::test {

using Bytes = std::vector<std::byte>;

/// Every filter that muster decodes in this build, with parameters for values of `value_bytes` bytes.
std::vector<detail::hdf5::Filter> known_filters(std::size_t value_bytes);
/// `bytes` after the filter.
Bytes encoded(const detail::hdf5::Filter& filter, const Bytes& bytes);
/// `bytes` after all filters, without those whose bit is set in `mask`.
Bytes encoded(const std::vector<detail::hdf5::Filter>& filters, std::uint32_t mask, Bytes bytes);

/// Values that compress: they change slowly, with noise in their low bits.
Bytes smooth_values(std::mt19937_64& random, std::size_t count, std::size_t value_bytes);

}  // namespace muster::test
