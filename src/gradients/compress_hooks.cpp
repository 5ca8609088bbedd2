#include "muster/comm_hooks.hpp"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace muster {
namespace {

CommHook compress_to(at::ScalarType type) {
  return [type](GradBucket& bucket, c10d::ProcessGroup& group) {
    const auto& gradients = bucket.gradients;
    const bool as_it_is = gradients.is_complex() || gradients.element_size() <= 2;
    std::vector<at::Tensor> tensors{as_it_is ? gradients : gradients.to(type)};
    group.allreduce(tensors)->wait();
    if (!as_it_is) gradients.copy_(tensors.front());
  };
}

}  // namespace

CommHook bf16_compress_hook() { return compress_to(at::kBFloat16); }
CommHook fp16_compress_hook() { return compress_to(at::kHalf); }

}  // namespace muster
