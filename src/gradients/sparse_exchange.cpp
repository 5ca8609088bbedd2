#include "gradients/sparse_exchange.hpp"

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unique.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/embedding.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <iterator>
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
};

SparseExchange::SparseExchange(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::ProcessGroup> group)
    : Exchange(parameters.size(), group->getSize()), group_(std::move(group)) {
  for (const auto& parameter : parameters) gradients_.push_back({parameter.detach()});
}

SparseExchange::~SparseExchange() = default;

void SparseExchange::add_gradient(std::size_t index, const at::Tensor& gradient, ParameterUse) {
  const at::NoGradGuard no_grad;
  auto& own = gradients_[index];
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

  // Each rank sends how many rows it has of each gradient, and its notes.
  const auto count = static_cast<std::int64_t>(gradients_.size());
  const auto notes = at::from_blob(notes_.numbers().data(), {std::ssize(notes_.numbers())}, at::kFloat);
  std::vector<double> rows_here;
  for (const auto& own : gradients_) rows_here.push_back(static_cast<double>(own.rows.size(0)));
  const auto mine = at::cat({at::tensor(rows_here, at::kDouble), notes.to(at::kDouble)});
  const auto all = at::stack(gather(mine.to(gradients_.front().parameter.device()))).cpu();
  notes.copy_(all.sum(0).slice(0, count));
  const auto row_counts = all.slice(1, 0, count).to(at::kLong);
  const auto rows_of = row_counts.accessor<std::int64_t, 2>();  // [ranks][gradients]

  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    auto& own = gradients_[i];
    std::int64_t longest = 0;
    for (std::size_t r = 0; r < world; ++r) longest = std::max(longest, rows_of[r][i]);
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
      all_rows[r] = all_rows[r].narrow(0, 0, rows_of[r][i]);
      all_values[r] = all_values[r].narrow(0, 0, rows_of[r][i]);
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
