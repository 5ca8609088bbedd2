// Averages sparse gradients of embeddings: each rank sends its rows to all ranks, and each rank sums them in the order
// of ranks.
#pragma once

#include "gradients/exchange.hpp"

#include <c10/util/intrusive_ptr.h>

#include <set>
#include <vector>

namespace c10d {
class ProcessGroup;
}
namespace torch::nn {
class Module;
}

namespace muster::detail::gradients {

/// Returns the addresses of the weights of embeddings made with sparse(true); their gradients are sparse.
std::set<const void*> sparse_parameters(const torch::nn::Module& module);

/// For gradients that are sparse in their first dimension. Sends nothing before finish().
class SparseExchange final : public Exchange {
 public:
  SparseExchange(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::ProcessGroup> group);
  ~SparseExchange() override;

  void finish() override;
  void fetch(std::size_t index, at::Tensor& gradient) override;

 private:
  struct Gradient;
  void begin_round() override {}
  void add_gradient(std::size_t index, const at::Tensor& gradient, ParameterUse use) override;
  std::vector<at::Tensor> gather(const at::Tensor& own);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<Gradient> gradients_;  ///< [parameters]
};

}  // namespace muster::detail::gradients
