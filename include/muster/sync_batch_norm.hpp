// Batch-norm over the batches of all ranks, for models where each rank has only a few samples at a time.
//
//   norm = register_module("norm", muster::SyncBatchNorm2d(64));   // in your own module, in place of BatchNorm2d
//   session.prepare_model(layers, {.sync_batch_norm = true});      // or for all batch-norms in a Sequential
//
// In training on several ranks, mean and variance are computed over the samples of all ranks, each sample once.
// Outputs, gradients and running statistics are those of one rank with the whole batch, up to rounding. An empty batch
// (of weight 0, see Batch::size) does not count. In evaluation, on one rank, and in a model that is not prepared (such
// as the clone() of a prepared one), it computes as torch's batch-norm. Options, names and state are always torch's.
//
// A forward pass in training is collective, and so is its backward pass: all ranks must run the same passes in the same
// order, without join() and without virtual workers. Inputs may be in 16 bits; statistics are in float, and are summed
// in double.
//
// This header needs torch's modules, so muster.hpp leaves it out.
#pragma once

#include <muster/detail/export.hpp>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/batchnorm.h>

#include <cstddef>
#include <iosfwd>
#include <memory>
#include <vector>

namespace muster {

namespace detail::gradients {

class BatchNormRanks;

/// The base class by which prepare_model finds synchronised modules.
class MUSTER_API Synchronised {
 public:
  Synchronised() = default;
  /// A copy, such as a clone(), is an ordinary batch-norm until its own model is prepared.
  Synchronised(const Synchronised&) noexcept {}
  Synchronised& operator=(const Synchronised&) noexcept { return *this; }
  virtual ~Synchronised() = default;
  /// `ranks` is held weakly: the module may outlive its session, and is an ordinary batch-norm from then on.
  void synchronise_over(const std::shared_ptr<BatchNormRanks>& ranks, int layer) {
    ranks_ = ranks;
    layer_ = layer;
  }

 protected:
  std::weak_ptr<BatchNormRanks> ranks_;
  int layer_ = 0;  ///< number of this layer in the model
};

/// A batch-norm operator, for modules that run operators instead of submodules, such as an exported program.
class MUSTER_API SynchronisedOperator : public Synchronised {
 public:
  bool is_connected() const noexcept { return !ranks_.expired(); }
  /// torch::batch_norm() in training, over the batches of all ranks. Weight and bias, and mean and variance, may be
  /// undefined. Collective; only if is_connected().
  at::Tensor operator()(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                        const at::Tensor& running_mean, const at::Tensor& running_var, double momentum,
                        double eps) const;
};

/// The base class of modules with batch-norm operators, by which prepare_model finds these modules.
class MUSTER_API BatchNormOperators {
 public:
  virtual ~BatchNormOperators() = default;
  /// Throws an Error if a batch-norm of the module cannot be synchronised.
  virtual void require_synchronisable() const = 0;
  /// ModelOptions::sync_batch_norm: makes all batch-norms synchronised ones. Call require_synchronisable() before, for
  /// all modules of the model, so that none is changed if one of them is refused.
  virtual void synchronise_batch_norms() = 0;
  /// The synchronised batch-norms, in the order of the forward pass; the module owns them.
  virtual std::vector<SynchronisedOperator*> synchronised_operators() = 0;
};

}  // namespace detail::gradients

template <std::size_t D, class Derived>
class MUSTER_API SyncBatchNormImplBase : public torch::nn::BatchNormImplBase<D, Derived>,
                                         public detail::gradients::Synchronised {
 public:
  using torch::nn::BatchNormImplBase<D, Derived>::BatchNormImplBase;

  /// Collective in training.
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  /// Replaces one of torch's batch-norms: takes over its parameters, the memory of its buffers, and its mode.
  template <class BatchNorm>
  void take_over(const BatchNorm& other) {
    if (this->options.affine()) {
      this->parameters_["weight"] = this->weight = other.weight;
      this->parameters_["bias"] = this->bias = other.bias;
    }
    if (this->options.track_running_stats()) {
      this->running_mean.set_data(other.running_mean);
      this->running_var.set_data(other.running_var);
      this->num_batches_tracked.set_data(other.num_batches_tracked);
    }
    this->train(other.is_training());
  }

 protected:
  void _check_input_dim(const at::Tensor& input) override;
};

class MUSTER_API SyncBatchNorm1dImpl : public SyncBatchNormImplBase<1, SyncBatchNorm1dImpl> {
 public:
  using SyncBatchNormImplBase::SyncBatchNormImplBase;
};
TORCH_MODULE(SyncBatchNorm1d);

class MUSTER_API SyncBatchNorm2dImpl : public SyncBatchNormImplBase<2, SyncBatchNorm2dImpl> {
 public:
  using SyncBatchNormImplBase::SyncBatchNormImplBase;
};
TORCH_MODULE(SyncBatchNorm2d);

class MUSTER_API SyncBatchNorm3dImpl : public SyncBatchNormImplBase<3, SyncBatchNorm3dImpl> {
 public:
  using SyncBatchNormImplBase::SyncBatchNormImplBase;
};
TORCH_MODULE(SyncBatchNorm3d);

}  // namespace muster
