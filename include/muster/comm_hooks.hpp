// Communication hooks: how gradients are averaged over the ranks. Passed to ModelOptions::comm_hook.
//
//   session.prepare_model(net, {.comm_hook = muster::bf16_compress_hook()});
//
// Your own hook averages a bucket as you like. This one does the same as no hook:
//
//   auto hook = [](muster::GradBucket& bucket, c10d::ProcessGroup& group) {
//     std::vector<at::Tensor> tensors{bucket.gradients};
//     group.allreduce(tensors)->wait();
//   };
//
// Such a hook needs <torch/csrc/distributed/c10d/ProcessGroup.hpp>.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/json.hpp>

#include <ATen/core/Tensor.h>

#include <any>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace muster {

/// Gradients that are averaged in one message.
struct GradBucket {
  /// [elements], of one type on one device: this rank's gradients, weighted by its samples and divided by the number of
  /// ranks, so that their sum over the ranks is the average. The hook replaces them by the average, the same on all
  /// ranks. With weights from the program (session.step(batch, weight)), the sum is a multiple of the average, and
  /// muster divides the result afterwards. From the second average on, the multiple is between 1 and about 2 if the
  /// weights change little.
  const at::Tensor gradients;
  /// Views of `gradients`: one for each parameter, in its shape.
  const std::vector<at::Tensor> views;
  /// The bucket's number among the model's buckets, from 0 on. They are averaged in this order; `last` marks the last
  /// one.
  const std::size_t index = 0;
  const bool last = false;
  /// The hook's own data, kept for this bucket from one backward() to the next. Empty at first, and again when the
  /// buckets change: after the first backward() that computed all gradients, if it did not do so from the last
  /// parameter to the first, and when parameters are unfrozen that were frozen in prepare_model.
  std::any memory = {};
  /// One for each view: true if a sample of any rank has used the parameter since its .grad was last averaged; the same
  /// on all ranks. The result in an unused view is ignored: that .grad stays as it is. Empty: all are used.
  std::vector<bool> used = {};
};

/// Called at the end of every backward() that averages, for each bucket, on all ranks in the same order, without
/// recording gradients. The group belongs to the model alone, so a hook may start and wait for any operations. A hook
/// may ignore `used`, unless it keeps gradients from one call to the next. Gradients may be NaN or infinite.
using CommHook = std::function<void(GradBucket& bucket, c10d::ProcessGroup& group)>;

/// Sends gradients as bfloat16 or half precision; gradients of 16 bits and complex ones are sent as they are. With
/// muster's own backend, the ranks of a node are summed in float, and the node's sum is rounded to 16 bits before it is
/// sent to other nodes. In half precision, values above 65504 become infinite.
MUSTER_API CommHook bf16_compress_hook();
MUSTER_API CommHook fp16_compress_hook();

struct PowerSgdOptions {
  /// The rank of the approximation: a higher one is closer to the gradient, and sends more.
  int rank = 1;
  /// The first `start_iteration` averages of a bucket are exact, since gradients change most in the beginning.
  std::int64_t start_iteration = 10;
  /// A matrix is compressed only if it then becomes smaller by more than this factor.
  double min_compression_rate = 2;
  /// Adds the error of the approximation to this rank's next gradient. This takes as much memory as the compressed
  /// gradients, in float for gradients of 16 bits.
  bool error_feedback = true;
  /// The seed of the random numbers with which Q begins; the same on all ranks.
  std::uint64_t seed = 0;
};

/// PowerSGD (Vogels et al. 2019, arXiv 1905.13727): sends a gradient that is a matrix M as two thin matrices, P = M Q
/// and Q = Mᵀ P with orthogonal P, and replaces it by P Qᵀ. A gradient of more than two dimensions is treated as a
/// matrix of its first dimension by all others. Vectors, complex gradients, and matrices that would not become small
/// enough are averaged as they are. A compressed bucket that is not finite on some rank, as may happen with a
/// GradScaler, becomes NaN on all ranks and does not change the stored errors. Neither does a parameter that no rank's
/// batch has used.
MUSTER_API CommHook powersgd_hook(const PowerSgdOptions& options = {});

}  // namespace muster
