// The training that is measured: a model on random images in memory, SGD with momentum, cross entropy.
#pragma once

#include "models/models.hpp"

#include <torch/optim/sgd.h>
#include <muster/config.hpp>
#include <muster/dataset.hpp>
#include <muster/launch.hpp>
#include <muster/session.hpp>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace muster::bench {

struct Batch {
  torch::Tensor images;  ///< [N, 1, 28, 28]
  torch::Tensor labels;  ///< [N]
};

/// Returns several batches: different on every rank, the same in every run.
std::vector<Batch> random_batches(int rank, std::int64_t batch_size);

/// Makes a model. It has the same weights in every call and on every rank.
std::shared_ptr<fashion::Classifier> fresh_model(const std::string& name);

/// Returns SGD with momentum, the default optimizer of Training.
torch::optim::SGD momentum_sgd(const fashion::Classifier& model);

/// Returns momentum_sgd(), prepared by `by` (a session or a DataParallel), which fuses its step with the averaging.
template <class By>
std::unique_ptr<torch::optim::Optimizer> prepared_sgd(By& by, const fashion::Classifier& model) {
  using Optimizer = PreparedOptimizer<torch::optim::SGD>;
  return std::unique_ptr<torch::optim::Optimizer>(
      new Optimizer(by.prepare_optimizer(momentum_sgd(model), {.fuse = Fuse::always})));
}

class Training {
 public:
  /// `average`: called after each backward().
  Training(std::shared_ptr<fashion::Classifier> model, std::vector<Batch> batches, std::function<void()> average = {});
  /// Uses this optimizer, such as that of prepared_sgd().
  Training(std::shared_ptr<fashion::Classifier> model, std::vector<Batch> batches,
           std::unique_ptr<torch::optim::Optimizer> optimizer, std::function<void()> average = {});

  void step();
  const fashion::Classifier& model() const { return *model_; }

 private:
  std::shared_ptr<fashion::Classifier> model_;
  std::vector<Batch> batches_;
  std::function<void()> average_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::size_t next_ = 0;
};

/// Calls `body` as the training function of a run. Removes the run's folder afterwards. Collective.
void in_session(Launch& launch, const std::string& name, const std::function<void(Session&)>& body,
                const CheckpointConfig& config = {}, const std::map<std::string, Dataset>& datasets = {});

}  // namespace muster::bench
