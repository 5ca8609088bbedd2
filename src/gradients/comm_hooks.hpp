// What PowerSGD keeps for a bucket, and its two factors' arithmetic.
//
// All ranks end with the same bits whatever their processors are: what decides them is computed from numbers that all
// ranks share, by operations that round each element alone (outer products) or in one fixed order (orthogonalisation).
#pragma once

#include "muster/comm_hooks.hpp"

#include <cstdint>
#include <vector>

namespace muster::detail::gradients {

/// A matrix of the bucket that is compressed; factors lie by rows, so that a direction is contiguous.
struct LowRank {
  std::size_t view = 0;  ///< in the bucket
  std::int64_t rows = 0, columns = 0, rank = 0;
  at::Tensor q = {};      ///< [rank, columns], of the last pass: where the next one begins
  at::Tensor error = {};  ///< [rows, columns], what was left out on this rank; undefined while nothing was
};

/// GradBucket::memory.
struct PowerSgdMemory {
  std::int64_t iteration = 0;
  std::vector<LowRank> matrices = {};
  std::vector<at::Tensor> others = {};  ///< the views that are not compressed
};

/// Rows × columns at this rank, if that gains.
bool gains(std::int64_t rows, std::int64_t columns, std::int64_t rank, double min_compression_rate);

/// Makes the rows of [rank, length] orthonormal in place, in double precision. A row that depends on those before it,
/// or is zero, gives way to one drawn from `seed`. rank ≤ length.
void orthonormalise(const at::Tensor& rows, std::uint64_t seed);

}  // namespace muster::detail::gradients
