// Batch-norm over the batches of all ranks: for models of which a rank has only few samples at a time.
//
//   norm = register_module("norm", muster::SyncBatchNorm2d(64));   // in a module of one's own, for torch's BatchNorm2d
//   session.prepare_model(layers, {.sync_batch_norm = true});      // or for all those of a Sequential
//
// In training, on several ranks, mean and variance are those of the samples of all ranks, each sample once; outputs,
// gradients and running statistics are those of one rank with the whole batch, up to rounding. A batch that only fills
// up a step (see Session::prepare_model; its weight is 0) does not count. In evaluation, in a model that is not
// prepared, in a clone() of one that is, or on one rank it is torch's batch-norm, whose options, names and state it
// has.
//
// A forward pass in training is collective, and so is its backward pass: all ranks run the same ones in the same order,
// without join() and without virtual workers. Inputs may be in 16 bits; statistics are in float, and summed in double.
//
// This header needs torch's modules, so muster.hpp leaves it out.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/batchnorm.h>

#include <cstddef>
#include <iosfwd>
#include <memory>

namespace muster {

namespace detail::gradients {

class SharedStatistics;

/// What prepare_model looks for in a module.
class Synchronised {
 public:
  Synchronised() = default;
  /// A copy, as by clone(), is an ordinary one until its own model is prepared.
  Synchronised(const Synchronised&) noexcept {}
  Synchronised& operator=(const Synchronised&) noexcept { return *this; }
  virtual ~Synchronised() = default;
  /// Held weakly: the module may outlive its session, and is then an ordinary one.
  void synchronise_over(const std::shared_ptr<SharedStatistics>& ranks, int layer) {
    ranks_ = ranks;
    layer_ = layer;
  }

 protected:
  std::weak_ptr<SharedStatistics> ranks_;
  int layer_ = 0;  ///< of the model's, to tell them apart
};

}  // namespace detail::gradients

template <std::size_t D, class Derived>
class SyncBatchNormImplBase : public torch::nn::BatchNormImplBase<D, Derived>, public detail::gradients::Synchronised {
 public:
  using torch::nn::BatchNormImplBase<D, Derived>::BatchNormImplBase;

  /// Collective in training.
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  /// Goes on in the place of one of torch's: with its parameters, and the memory of its buffers.
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

class SyncBatchNorm1dImpl : public SyncBatchNormImplBase<1, SyncBatchNorm1dImpl> {
 public:
  using SyncBatchNormImplBase::SyncBatchNormImplBase;
};
TORCH_MODULE(SyncBatchNorm1d);

class SyncBatchNorm2dImpl : public SyncBatchNormImplBase<2, SyncBatchNorm2dImpl> {
 public:
  using SyncBatchNormImplBase::SyncBatchNormImplBase;
};
TORCH_MODULE(SyncBatchNorm2d);

class SyncBatchNorm3dImpl : public SyncBatchNormImplBase<3, SyncBatchNorm3dImpl> {
 public:
  using SyncBatchNormImplBase::SyncBatchNormImplBase;
};
TORCH_MODULE(SyncBatchNorm3d);

}  // namespace muster
