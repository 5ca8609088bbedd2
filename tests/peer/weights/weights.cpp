// For weights.py: makes a checkpoint (weights make FOLDER), and copies a file of weights from either format to either
// (weights copy FROM TO), which prints the values that are no tensors.
#include "muster/weights.hpp"
#include "muster/checkpoint.hpp"

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

namespace {

void make(const std::filesystem::path& folder) {
  torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3), torch::nn::Linear(3, 2));
  torch::optim::Adam optimizer(net->parameters());
  net->forward(at::randn({5, 4})).sum().backward();
  optimizer.step();
  const auto numbers = at::arange(6, at::kFloat).sub(2.5);
  auto bfloat16 = numbers.to(at::kBFloat16), half = numbers.to(at::kHalf), mask = numbers.gt(0),
       empty = at::empty({0, 3}), complex = at::complex(numbers, numbers.neg()), byte = at::arange(250, 256, at::kByte);
  auto all = [&] {
    return muster::StateDict{.tensors = {{"bfloat16", bfloat16},
                                         {"half", half},
                                         {"mask", mask},
                                         {"empty", empty},
                                         {"complex", complex},
                                         {"turned", numbers.view({2, 3}).t()},
                                         {"byte", byte}}};
  };
  muster::Checkpoint::from_dict(
      {{"model", net}, {"optimizer", optimizer}, {"kinds", muster::StateEntry(all, [](const muster::StateDict&) {})}})
      .to_directory(folder);
}

bool is_torch(const std::filesystem::path& path) { return path.extension() == ".pt"; }

void copy(const std::filesystem::path& from, const std::filesystem::path& to) {
  const auto state = is_torch(from) ? muster::load_torch(from) : muster::load_safetensors(from);
  is_torch(to) ? muster::save_torch(state, to) : muster::save_safetensors(state, to);
  std::puts(state.values.dump().c_str());
}

}  // namespace

int main(int, char** argv) {
  try {
    argv[1] == std::string("make") ? make(argv[2]) : copy(argv[2], argv[3]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 65;
  }
}
