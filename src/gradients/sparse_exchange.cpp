#include "gradients/sparse_exchange.hpp"

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unique.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/embedding.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <bit>
#include <utility>

namespace muster::detail::gradients {

std::set<const void*> sparse_parameters(const torch::nn::Module& module) {
  std::set<const void*> parameters;
  for (const auto& part : module.modules()) {
    if (const auto* embedding = part->as<torch::nn::EmbeddingImpl>(); embedding && embedding->options.sparse())
      parameters.insert(embedding->weight.unsafeGetTensorImpl());
    if (const auto* bag = part->as<torch::nn::EmbeddingBagImpl>(); bag && bag->options.sparse())
      parameters.insert(bag->weight.unsafeGetTensorImpl());
  }
  return parameters;
}

struct SparseExchange::Gradient {
  at::Tensor parameter;
  // Indices and values of this rank's rows, each row once; after finish(), of the average's rows.
  at::Tensor rows = {};    ///< [n] int64
  at::Tensor values = {};  ///< [n, …]
  ParameterUse use = ParameterUse::unused;
};

SparseExchange::SparseExchange(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)), users_(parameters.size()) {
  for (const auto& parameter : parameters) gradients_.push_back({parameter.detach()});
}

SparseExchange::~SparseExchange() = default;

void SparseExchange::add(std::size_t index, const at::Tensor& gradient, ParameterUse use) {
  const at::NoGradGuard no_grad;
  auto& own = gradients_[index];
  own.use = use;
  if (gradient.defined()) {
    const auto rows = gradient.coalesce();
    own.rows = rows._indices()[0].contiguous();
    own.values = rows._values() / group_->getSize();
  } else {
    own.rows = at::empty({0}, own.parameter.options().dtype(at::kLong));
    auto none = own.parameter.sizes().vec();
    none[0] = 0;
    own.values = own.parameter.new_empty(none);
  }
}

/// Returns the tensors of all ranks, which must have the same shape. Collective.
std::vector<at::Tensor> SparseExchange::gather(const at::Tensor& own) {
  std::vector<std::vector<at::Tensor>> all(1);
  for (int r = 0; r < group_->getSize(); ++r) all[0].push_back(at::empty_like(own));
  std::vector<at::Tensor> one{own};
  group_->allgather(all, one)->wait();
  return std::move(all[0]);
}

void SparseExchange::finish() {
  const at::NoGradGuard no_grad;
  const auto world = static_cast<std::size_t>(group_->getSize());

  // Each rank sends two numbers per gradient: its number of rows and its use of the parameter; then its flags and the
  // bits of its weight.
  const auto last = gradients_.size();
  const auto mine = at::zeros({static_cast<std::int64_t>(last) + 1, 2}, at::kLong);
  auto written = mine.accessor<std::int64_t, 2>();
  for (std::size_t i = 0; i < last; ++i) {
    written[i][0] = gradients_[i].rows.size(0);
    written[i][1] = static_cast<std::int64_t>(gradients_[i].use);
  }
  written[last][0] = flags_;
  written[last][1] = std::bit_cast<std::int64_t>(std::exchange(weight_, 0));
  const auto all = at::stack(gather(mine.to(gradients_.front().parameter.device()))).cpu();
  const auto headers = all.accessor<std::int64_t, 3>();  // [ranks][gradients + 1][2]
  for (std::size_t r = 0; r < world; ++r) {
    flags_ |= static_cast<Flags>(headers[r][last][0]);
    weight_ += std::bit_cast<double>(headers[r][last][1]) / static_cast<double>(world);
  }

  for (std::size_t i = 0; i < last; ++i) {
    auto& own = gradients_[i];
    std::int64_t longest = 0;
    users_[i] = 0;
    for (std::size_t r = 0; r < world; ++r) {
      longest = std::max(longest, headers[r][i][0]);
      const auto use = static_cast<ParameterUse>(headers[r][i][1]);
      users_[i] = use == ParameterUse::abandoned || users_[i] < 0 ? -1 : users_[i] + (use == ParameterUse::used);
    }
    if (longest == 0) continue;
    // Padded to the greatest number of rows, since not every backend can gather tensors of different lengths.
    auto shape = own.parameter.sizes().vec();
    shape[0] = longest;
    auto rows = at::zeros({longest}, own.rows.options());
    auto values = own.parameter.new_zeros(shape);
    rows.narrow(0, 0, own.rows.size(0)).copy_(own.rows);
    values.narrow(0, 0, own.rows.size(0)).copy_(own.values);
    auto all_rows = gather(rows), all_values = gather(values);
    for (std::size_t r = 0; r < world; ++r) {
      all_rows[r] = all_rows[r].narrow(0, 0, headers[r][i][0]);
      all_values[r] = all_values[r].narrow(0, 0, headers[r][i][0]);
    }
    own.rows = std::get<0>(at::_unique(at::cat(all_rows), /*sorted=*/true));
    shape[0] = own.rows.size(0);
    auto sum = at::zeros(shape, values.options().dtype(at::toOpMathType(values.scalar_type())));
    // Each rank has a row at most once, so every rank adds the values of a row in the order of ranks.
    for (std::size_t r = 0; r < world; ++r)
      sum.index_add_(0, at::searchsorted(own.rows, all_rows[r]), all_values[r].to(sum.scalar_type()));
    own.values = sum.to(values.scalar_type());
  }
}

void SparseExchange::fetch(std::size_t index, at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const auto& own = gradients_[index];
  const auto average = at::sparse_coo_tensor(own.rows.unsqueeze(0), own.values, own.parameter.sizes(),
                                             own.parameter.options().layout(at::kSparse), /*is_coalesced=*/true);
  if (gradient.defined())
    gradient.copy_(average);
  else
    gradient = average;
}

}  // namespace muster::detail::gradients
