// Communication hooks: what is sent when gradients are averaged. ModelOptions::comm_hook takes one.
//
//   session.prepare_model(net, {.comm_hook = muster::bf16_compress_hook()});
//
// One of your own averages a bucket as it likes, for instance as it is done without a hook:
//
//   auto hook = [](muster::GradBucket& bucket, c10d::ProcessGroup& group) {
//     std::vector<at::Tensor> tensors{bucket.gradients};
//     group.allreduce(tensors)->wait();
//   };
//
// for which it includes <torch/csrc/distributed/c10d/ProcessGroup.hpp>.
#pragma once

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

/// Gradients that travel together.
struct GradBucket {
  /// [elements], of one type on one device: this rank's gradients, weighted by its samples and divided by the number of
  /// ranks, so that their sum over the ranks is the average. The hook leaves the average in it, the same on all ranks.
  const at::Tensor gradients;
  /// The parts of it, each in the shape of its parameter.
  const std::vector<at::Tensor> views;
  /// Of the model's buckets, which come one after the other.
  const std::size_t index = 0;
  const bool last = false;
  /// The hook's own, kept for this bucket from one backward() to the next. Empty at first, and again when the buckets
  /// change: after the first backward(), if it made gradients in another order than that of the parameters, and when
  /// parameters have been unfrozen that were frozen in prepare_model.
  std::any memory = {};
  /// [views]: whether a sample of any rank has used the parameter since its .grad was last averaged; the same on all
  /// ranks. What the hook leaves in a view that is not used goes nowhere: that .grad stays as it is. Empty: all are
  /// used.
  std::vector<bool> used = {};
};

/// Called at the end of every backward() that averages, for each bucket, on all ranks in the same order, without
/// recording gradients. The group is the model's own, so a hook may start and wait for what it likes. Which ranks have
/// used a parameter need not concern it, unless it keeps a memory of what it has sent. NaNs are passed on.
using CommHook = std::function<void(GradBucket& bucket, c10d::ProcessGroup& group)>;

/// Sends gradients as bfloat16 or half precision; those of 16 bits, and complex ones, as they are. Where muster's own
/// backend makes the sum, the ranks of a node are added in float and the node's part is rounded to 16 bits before it
/// goes to other nodes. In half precision values above 65504 become infinite.
CommHook bf16_compress_hook();
CommHook fp16_compress_hook();

struct PowerSgdOptions {
  /// Of the approximation: higher is nearer to the gradient, and more to send.
  int rank = 1;
  /// The first averages are exact; they are those in which gradients change the most.
  std::int64_t start_iteration = 10;
  /// A matrix is compressed where that makes it smaller by more than this factor.
  double min_compression_rate = 2;
  /// What the approximation has left out is added to this rank's next gradient. It takes as much memory as the
  /// gradients.
  bool error_feedback = true;
  /// Of the first approximation; the same on all ranks.
  std::uint64_t seed = 0;
};
void to_json(Json& json, const PowerSgdOptions& options);
void from_json(const Json& json, PowerSgdOptions& options);

/// PowerSGD (Vogels et al. 2019, arXiv 1905.13727): a gradient that is a matrix M travels as two thin ones, P = M Q and
/// Q = Mᵀ P with orthogonal P, and becomes P Qᵀ. A gradient of more than two dimensions is a matrix of its first and
/// all others. Vectors and matrices that would not gain are averaged as they are. A bucket that is not finite on some
/// rank, as with a GradScaler, is NaN on all of them and leaves no trace in the memory of errors. Nor does a parameter
/// that no rank's batch has used.
CommHook powersgd_hook(const PowerSgdOptions& options = {});

}  // namespace muster
