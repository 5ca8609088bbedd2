#include "gradients/ordered_sum.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace muster::detail::gradients {

at::Tensor ordered_sum(c10d::ProcessGroup& group, const std::vector<at::Tensor>& micro_batches) {
  const at::NoGradGuard no_grad;
  const int rank = group.getRank(), last = group.getSize() - 1;
  std::vector<at::Tensor> sum{rank == 0 ? micro_batches.front().clone() : at::empty_like(micro_batches.front())};
  if (rank > 0) group.recv(sum, rank - 1, 0)->wait();
  for (std::size_t s = rank == 0 ? 1 : 0; s < micro_batches.size(); ++s) sum[0].add_(micro_batches[s]);
  if (rank < last) group.send(sum, rank + 1, 0)->wait();
  if (last > 0) group.broadcast(sum, {.rootRank = last})->wait();
  return sum[0];
}

}  // namespace muster::detail::gradients
