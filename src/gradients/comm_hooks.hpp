// The memory of PowerSGD for a bucket, and the arithmetic of its two factors.
//
// All ranks end with the same bits, even on different processors. The results are computed from numbers that all ranks
// share, by operations that round each element by itself (outer products) or in one fixed order (orthogonalisation).
#pragma once

#include "muster/comm_hooks.hpp"

#include <cstdint>
#include <vector>

namespace muster::detail::gradients {

/// A matrix of the bucket that is compressed. Each row of a factor is one direction, so directions are contiguous.
struct LowRank {
  std::size_t view = 0;  ///< index of the view in the bucket
  std::int64_t rows = 0, columns = 0, rank = 0;
  at::Tensor q = {};      ///< [rank, columns], result of the last round, from which the next one starts
  at::Tensor error = {};  ///< [rows, columns], left out by compression on this rank; undefined if there is none
};

/// GradBucket::memory.
struct PowerSgdMemory {
  std::int64_t iteration = 0;
  std::vector<LowRank> matrices = {};
  std::vector<at::Tensor> others = {};  ///< views that are not compressed
};

/// True if the factors of a matrix of rows × columns, at this rank, are smaller than it by more than the given rate.
bool saves_traffic(std::int64_t rows, std::int64_t columns, std::int64_t rank, double min_compression_rate);

/// Makes the rows of [rank, length] orthonormal in place, in double precision. A row that is zero or depends linearly
/// on earlier rows is replaced by a random one drawn from `seed`. rank ≤ length.
void orthonormalise(const at::Tensor& rows, std::uint64_t seed);

}  // namespace muster::detail::gradients
