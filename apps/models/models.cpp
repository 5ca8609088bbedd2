#include "models.hpp"

#include <torch/nn.h>

#include <stdexcept>
#include <vector>

namespace fashion {
namespace {

namespace nn = torch::nn;

class Perceptron final : public Classifier {
 public:
  explicit Perceptron(const std::vector<std::int64_t>& sizes) {
    layers->push_back(nn::Flatten());
    for (std::size_t i = 0; i + 1 < sizes.size(); ++i) {
      if (i > 0) layers->push_back(nn::ReLU());
      layers->push_back(nn::Linear(sizes[i], sizes[i + 1]));
    }
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) override { return layers->forward(x); }

 private:
  nn::Sequential layers;
};

class Convolutions final : public Classifier {
 public:
  Convolutions() { register_module("layers", layers); }
  torch::Tensor forward(torch::Tensor x) override { return layers->forward(x); }

 private:
  nn::Sequential layers{nn::Conv2d(nn::Conv2dOptions(1, 32, 3)),
                        nn::ReLU(),
                        nn::Conv2d(nn::Conv2dOptions(32, 64, 3)),
                        nn::ReLU(),
                        nn::MaxPool2d(nn::MaxPool2dOptions(2)),
                        nn::Flatten(),
                        nn::Linear(9216, 128),
                        nn::ReLU(),
                        nn::Linear(128, 10)};
};

nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

/// Two 3 × 3 convolutions with a residual connection.
class BasicBlock final : public nn::Module {
 public:
  BasicBlock(std::int64_t in, std::int64_t out, std::int64_t stride)
      : conv1(register_module("conv1", convolution(in, out, 3, stride))),
        bn1(register_module("bn1", nn::BatchNorm2d(out))),
        conv2(register_module("conv2", convolution(out, out, 3, 1))),
        bn2(register_module("bn2", nn::BatchNorm2d(out))) {
    if (stride == 1 && in == out) return;
    shortcut = register_module("shortcut", nn::Sequential(convolution(in, out, 1, stride), nn::BatchNorm2d(out)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = bn2(conv2(bn1(conv1(x)).relu_()));
    return (y + (shortcut.is_empty() ? x : shortcut->forward(x))).relu_();
  }

 private:
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Conv2d conv2;
  nn::BatchNorm2d bn2;
  nn::Sequential shortcut{nullptr};
};

class ResNet18 final : public Classifier {
 public:
  ResNet18()
      : conv1(register_module("conv1", convolution(1, 64, 7, 2))),
        bn1(register_module("bn1", nn::BatchNorm2d(64))),
        blocks(register_module("blocks", nn::Sequential())),
        fc(register_module("fc", nn::Linear(512, 10))) {
    std::int64_t in = 64;
    for (const std::int64_t out : {64, 128, 256, 512}) {
      blocks->push_back(BasicBlock(in, out, in == out ? 1 : 2));
      blocks->push_back(BasicBlock(out, out, 1));
      in = out;
    }
  }
  torch::Tensor forward(torch::Tensor x) override {
    x = torch::max_pool2d(bn1(conv1(x)).relu_(), 3, 2, 1);
    return fc(blocks->forward(x).mean({2, 3}));
  }

 private:
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Sequential blocks;
  nn::Linear fc;
};

}  // namespace

std::shared_ptr<Classifier> make_model(const std::string& name) {
  if (name == "resnet18") return std::make_shared<ResNet18>();
  if (name == "cnn") return std::make_shared<Convolutions>();
  if (name == "mlp") return std::make_shared<Perceptron>(std::vector<std::int64_t>{784, 1024, 1024, 10});
  if (name == "mlp50") return std::make_shared<Perceptron>(std::vector<std::int64_t>{784, 3072, 3072, 256, 10});
  throw std::invalid_argument("there is no model \"" + name + "\"; the models are resnet18, cnn, mlp, mlp50");
}

}  // namespace fashion
