// One prepared model: weights made equal once, gradients averaged in every backward().
#pragma once

#include "data/step_weight.hpp"
#include "muster/model.hpp"

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>

namespace c10d {
class ProcessGroup;
}
namespace torch::nn {
class Module;
}

namespace muster::model {

/// What the models of a session share.
struct Shared {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::shared_ptr<const data::StepWeight> weight;
  std::shared_ptr<const int> no_sync_depth;  ///< 0: gradients are averaged
  c10::Device device = c10::kCPU;
};

/// Lives as long as the session; the hooks in the model's tensors hold it weakly, so the model may live longer.
class DataParallel {
 public:
  /// Moves the module, compares names, shapes and types over the ranks, copies rank 0's weights and buffers to all,
  /// installs the hooks. Collective. A mismatch is an Error (ExitCode::data) that names the parameter and the ranks.
  static std::shared_ptr<DataParallel> prepare(std::shared_ptr<torch::nn::Module> module, const Shared& shared,
                                               const ModelOptions& options);
  virtual ~DataParallel() = default;

  /// Batch-norm's running statistics become the mean over the ranks, every other buffer rank 0's. Collective.
  virtual void synchronise_buffers() = 0;
  virtual const torch::nn::Module* module() const noexcept = 0;
};

}  // namespace muster::model
