// Writes a checkpoint of every kind of tensor into the folder given, for read.py to look at with h5py.
#include "muster/checkpoint.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/nn/module.h>
#include <torch/optim/adam.h>

#include <memory>

namespace {

struct Net : torch::nn::Module {
  Net() {
    auto weight = register_parameter("weight", at::arange(24, at::kFloat).reshape({4, 6}).div(8));
    register_parameter("tied", weight);
    register_parameter("bias", at::arange(6, at::kDouble).neg());
    register_buffer("count", at::full({}, 7, at::kLong));
    register_buffer("empty", at::empty({0, 3}));
    register_buffer("turned", weight.detach().t());
  }
};

}  // namespace

int main(int, char** argv) {
  auto net = std::make_shared<Net>();
  auto outer = std::make_shared<torch::nn::Module>();
  outer->register_module("layer1", net);
  auto numbers = at::arange(6, at::kFloat).sub(2.5);
  auto bfloat16 = numbers.to(at::kBFloat16), half = numbers.to(at::kHalf), mask = numbers.gt(0),
       complex = at::complex(numbers, numbers.neg()), byte = at::arange(250, 256, at::kByte),
       large = at::arange(300'000, at::kDouble);
  torch::optim::Adam optimizer({net->parameters()[0]});
  net->parameters()[0].mutable_grad() = at::full({4, 6}, 0.5, at::kFloat);
  optimizer.step();
  muster::Checkpoint::from_dict({{"model", outer},
                                 {"optimizer", optimizer},
                                 {"bfloat16", bfloat16},
                                 {"half", half},
                                 {"mask", mask},
                                 {"complex", complex},
                                 {"byte", byte},
                                 {"large", large}})
      .to_directory(argv[1]);
}
