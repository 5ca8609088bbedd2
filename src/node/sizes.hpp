// The units in which shared memory is divided.
#pragma once

#include <cstddef>

namespace muster::detail::node {

constexpr std::size_t page = 4096;
/// Of the cache: what two ranks write to lies in different ones.
constexpr std::size_t line = 64;
/// What a rank claims at once of larger memory: whoever is early does more.
constexpr std::size_t part_bytes = std::size_t{256} << 10;

}  // namespace muster::detail::node
