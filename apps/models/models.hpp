// Models for 28 × 28 grey images in ten classes: input [N, 1, 28, 28], output [N, 10].
#pragma once

#include <torch/nn/module.h>

#include <string>

namespace fashion {

/// The base class of the models; they have a forward() with the same parameters.
class Classifier : public torch::nn::Module {
 public:
  virtual torch::Tensor forward(torch::Tensor x) = 0;
};

/// Makes one of these models: "resnet18" (He et al. 2015, with a first convolution for one channel), "cnn" (two
/// convolutions), "mlp" (784-1024-1024-10), "mlp50" (784-3072-3072-256-10, 50 MB of gradients).
std::shared_ptr<Classifier> make_model(const std::string& name);

}  // namespace fashion
