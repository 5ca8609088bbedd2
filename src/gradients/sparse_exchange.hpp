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

  void begin(Arrival, Flags flags, double weight) override {
    flags_ = flags;
    weight_ = weight;
  }
  void add(std::size_t index, const at::Tensor& gradient, ParameterUse use) override;
  void finish() override;
  int user_count(std::size_t index) const override { return users_[index]; }
  void fetch(std::size_t index, at::Tensor& gradient) override;
  Flags flags() const override { return flags_; }
  double mean_weight() const override { return weight_; }

 private:
  struct Gradient;
  std::vector<at::Tensor> gather(const at::Tensor& own);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<Gradient> gradients_;  ///< [parameters]
  std::vector<int> users_;           ///< [parameters]
  Flags flags_ = 0;                  ///< this rank's; after finish(), the OR over the ranks
  double weight_ = 0;                ///< this rank's; after finish(), the mean over the ranks
};

}  // namespace muster::detail::gradients
