// The memory of PowerSGD for a bucket, and the arithmetic of its two factors.
//
// The results have the same bits on all ranks, even on different processors: they are computed from equal numbers, by
// operations that round each element by itself (outer products) or in one fixed order (orthogonalisation).
#pragma once

#include "muster/comm_hooks.hpp"

#include <cstdint>
#include <vector>

namespace muster::detail::gradients {

/// A matrix of the bucket that is compressed. A factor has one row for each of its `rank` vectors, so each vector is
/// contiguous.
struct LowRank {
  std::size_t view = 0;  ///< index of the view in the bucket
  std::int64_t rows = 0, columns = 0, rank = 0;
  at::Tensor q = {};  ///< [rank, columns], the factor Q of the last round, from which the next round starts
  /// [rows, columns], what compression left out of this rank's gradient in the last round; undefined if nothing.
  at::Tensor error = {};
};

/// The contents of GradBucket::memory: what PowerSGD keeps of a bucket from round to round.
struct PowerSgdMemory {
  std::int64_t iteration = 0;
  std::vector<LowRank> matrices = {};
  std::vector<at::Tensor> others = {};  ///< views that are not compressed
};

/// The hook that sends gradients in a type of 16 bits. Over nodes on CPUs it is not called: the transport between them
/// sends the type (between_nodes.hpp).
struct SendAs {
  at::ScalarType type;
  void operator()(GradBucket& bucket, c10d::ProcessGroup& group) const;
};

/// True if the two factors of rank `rank` of a rows × columns matrix are smaller than the matrix by more than the given
/// rate.
bool saves_traffic(std::int64_t rows, std::int64_t columns, std::int64_t rank, double min_compression_rate);

/// Makes the rows of a [rank, length] tensor orthonormal in place, in double precision; rank ≤ length. A row that is
/// zero or a linear combination of earlier rows is replaced by a random row drawn from `seed`.
void orthonormalise(const at::Tensor& rows, std::uint64_t seed);

}  // namespace muster::detail::gradients
