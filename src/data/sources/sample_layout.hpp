// How the samples of a dataset are numbered, stored and divided.
#pragma once

#include "data/sources/permutation.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace muster::detail::data {

/// `count` consecutive items, from item `first`.
struct SampleRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};
/// The items that `rank` of `world` ranks gets out of `count`. If they do not divide evenly, the first ranks get one
/// more.
inline SampleRange share_of(std::int64_t count, int world, int rank) noexcept {
  const std::int64_t each = count / world, more = count % world;
  return {rank * each + std::min<std::int64_t>(rank, more), each + (rank < more ? 1 : 0)};
}

/// The rows of files that are stored in blocks, numbered through all files.
struct Blocks {
  std::int64_t rows = 0;                 ///< of a block, the last block of a file may be shorter; 0: no blocks
  std::vector<std::int64_t> files = {};  ///< rows of each file
  int lanes = 64;                        ///< how many blocks a shuffle mixes at a time
  bool operator==(const Blocks&) const = default;
};

/// The length of each sample of a dataset.
struct Lengths {
  std::vector<std::int64_t> of_samples;
  std::uint64_t hash = 0;

  explicit Lengths(std::vector<std::int64_t> lengths) : of_samples(std::move(lengths)), hash(of_samples.size()) {
    for (const auto length : of_samples) hash = mix(hash, static_cast<std::uint64_t>(length));
  }
};

}  // namespace muster::detail::data
