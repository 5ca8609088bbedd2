#include "gradients/sparse_exchange.hpp"

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unique.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/embedding.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
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

struct SparseExchange::Slot {
  at::Tensor parameter;
  // This rank's part: which rows, each once, and what is in them. Afterwards the average's.
  at::Tensor rows = {};    ///< [n] int64
  at::Tensor values = {};  ///< [n, …]
  Use use = Use::unused;
};

SparseExchange::SparseExchange(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)), users_(parameters.size()) {
  for (const auto& parameter : parameters) slots_.push_back({parameter.detach()});
}

SparseExchange::~SparseExchange() = default;

void SparseExchange::add(std::size_t index, const at::Tensor& gradient, Use use) {
  const at::NoGradGuard no_grad;
  auto& slot = slots_[index];
  slot.use = use;
  if (gradient.defined()) {
    const auto rows = gradient.coalesce();
    slot.rows = rows._indices()[0].contiguous();
    slot.values = rows._values() / group_->getSize();
  } else {
    slot.rows = at::empty({0}, slot.parameter.options().dtype(at::kLong));
    auto none = slot.parameter.sizes().vec();
    none[0] = 0;
    slot.values = slot.parameter.new_empty(none);
  }
}

/// The tensor of each rank, all of one shape.
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

  // How many rows each rank has, and its use of the parameter; at the end its note.
  auto own = at::zeros({static_cast<std::int64_t>(slots_.size()) + 1, 2}, at::kLong);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    own.mutable_data_ptr<std::int64_t>()[2 * i] = slots_[i].rows.size(0);
    own.mutable_data_ptr<std::int64_t>()[2 * i + 1] = static_cast<std::int64_t>(slots_[i].use);
  }
  own.mutable_data_ptr<std::int64_t>()[2 * slots_.size()] = flags_;
  auto headers = gather(own.to(slots_.front().parameter.device()));
  for (auto& header : headers) header = header.cpu();
  const auto header = [&](std::size_t rank, std::size_t slot) {
    return headers[rank].const_data_ptr<std::int64_t>() + 2 * slot;
  };
  for (std::size_t r = 0; r < world; ++r) flags_ |= static_cast<Flags>(header(r, slots_.size())[0]);

  for (std::size_t i = 0; i < slots_.size(); ++i) {
    auto& slot = slots_[i];
    std::int64_t longest = 0;
    users_[i] = 0;
    for (std::size_t r = 0; r < world; ++r) {
      longest = std::max(longest, header(r, i)[0]);
      const auto use = static_cast<Use>(header(r, i)[1]);
      users_[i] = use == Use::abandoned || users_[i] < 0 ? -1 : users_[i] + (use == Use::used);
    }
    if (longest == 0) continue;
    // As long as the longest, since not every backend takes lengths that differ.
    auto shape = slot.parameter.sizes().vec();
    shape[0] = longest;
    auto rows = at::zeros({longest}, slot.rows.options());
    auto values = slot.parameter.new_zeros(shape);
    if (const auto count = slot.rows.size(0); count > 0) {
      rows.narrow(0, 0, count).copy_(slot.rows);
      values.narrow(0, 0, count).copy_(slot.values);
    }
    auto all_rows = gather(rows), all_values = gather(values);
    for (std::size_t r = 0; r < world; ++r) {
      all_rows[r] = all_rows[r].narrow(0, 0, header(r, i)[0]);
      all_values[r] = all_values[r].narrow(0, 0, header(r, i)[0]);
    }
    slot.rows = std::get<0>(at::_unique(at::cat(all_rows), /*sorted=*/true));
    shape[0] = slot.rows.size(0);
    auto sum = at::zeros(shape, values.options().dtype(at::toOpMathType(values.scalar_type())));
    // A rank has each row once, so that the order of additions is that of the ranks, everywhere.
    for (std::size_t r = 0; r < world; ++r)
      sum.index_add_(0, at::searchsorted(slot.rows, all_rows[r]), all_values[r].to(sum.scalar_type()));
    slot.values = sum.to(values.scalar_type());
  }
}

void SparseExchange::fetch(std::size_t index, at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const auto& slot = slots_[index];
  const auto average = at::sparse_coo_tensor(slot.rows.unsqueeze(0), slot.values, slot.parameter.sizes(),
                                             slot.parameter.options().layout(at::kSparse), /*is_coalesced=*/true);
  if (gradient.defined())
    gradient.copy_(average);
  else
    gradient = average;
}

}  // namespace muster::detail::gradients
