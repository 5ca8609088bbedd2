#include "gradients/ordered_exchange.hpp"

#include "muster/error.hpp"

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <span>
#include <utility>

namespace muster::detail::gradients {
namespace {

std::span<float> elements_of(const at::Tensor& flat) {
  return {flat.mutable_data_ptr<float>(), static_cast<std::size_t>(flat.numel())};
}

}  // namespace

at::Tensor ordered_sum(c10d::ProcessGroup& group, const std::vector<at::Tensor>& micro_batches) {
  const at::NoGradGuard no_grad;
  const int rank = group.getRank(), last = group.getSize() - 1;
  const auto& first = micro_batches.front();
  const auto wide = first.options().dtype(at::toOpMathType(first.scalar_type()));
  std::vector<at::Tensor> sum{at::empty_like(first, wide)};
  if (rank == 0) sum[0].copy_(first);
  if (rank > 0) group.recv(sum, rank - 1, 0)->wait();
  for (std::size_t s = rank == 0 ? 1 : 0; s < micro_batches.size(); ++s) sum[0].add_(micro_batches[s]);
  if (rank < last) group.send(sum, rank + 1, 0)->wait();
  if (last > 0) group.broadcast(sum, {.rootRank = last})->wait();
  return sum[0];
}

OrderedExchange::OrderedExchange(const std::vector<at::Tensor>& parameters,
                                 c10::intrusive_ptr<c10d::ProcessGroup> group, const step::MicroBatchShare& share,
                                 std::shared_ptr<const step::Steps> steps)
    : Exchange(parameters.size(), share.total),
      group_(std::move(group)),
      share_(share),
      steps_(std::move(steps)),
      parameters_(parameters),
      layout_(parameters, by_type_and_device(parameters)),
      reduced_(layout_.buckets.size()) {
  const auto add_bucket = [&](std::size_t count, const at::TensorOptions& options) {
    auto& micro_batches = micro_batches_.emplace_back();
    for (int s = 0; s < share_.count; ++s)
      micro_batches.push_back(at::empty({static_cast<std::int64_t>(count)}, options));
  };
  for (const auto& [members, count] : layout_.buckets)
    add_bucket(count, parameters[members.front()].options().requires_grad(false));
  add_bucket(notes_.numbers().size(), at::kFloat);
}

void OrderedExchange::begin_round() {
  const auto refuse = [](const char* fact) {
    throw Error(ExitCode::user_error, "averaging gradients of virtual workers", fact,
                "Run one backward() for each batch of a split dataset");
  };
  const auto& batch = steps_->batch();
  if (batch.global == 0) refuse("there is no current batch of a split dataset");
  const bool again = std::exchange(abandoned_, false) && batch.number == batch_;
  if (batch.number == batch_ && !again) refuse("backward() has already run for this batch");
  micro_batch_ = static_cast<std::size_t>(batch.micro_batch);
  // Micro-batch 0 begins a new step. If the last step is incomplete and the program never requested its remaining
  // batches, the new step discards it. If it did request them, their numbers lie between, and they had no backward():
  // an error.
  const auto left_of_step = share_.count - static_cast<int>(next_);
  const bool follows = micro_batch_ == 0 ? next_ == 0 || left_of_step == 0 || batch.number != batch_ + left_of_step + 1
                                         : micro_batch_ == next_ && batch.number == batch_ + 1;
  if (!follows && !again) refuse("a batch of the step had no backward()");
  batch_ = batch.number;
  next_ = micro_batch_ + 1;
}

void OrderedExchange::add_gradient(std::size_t index, const at::Tensor& gradient, ParameterUse use) {
  const at::NoGradGuard no_grad;
  abandoned_ = abandoned_ || use == ParameterUse::abandoned;
  const auto& slice = layout_.slices[index];
  const auto values = view_like(parameters_[index], micro_batches_[slice.bucket][micro_batch_], slice.first_element);
  if (gradient.defined())
    values.copy_(gradient);
  else
    values.zero_();
}

void OrderedExchange::finish() {
  const at::NoGradGuard no_grad;
  std::ranges::copy(notes_.numbers(), elements_of(micro_batches_.back()[micro_batch_]).begin());
  complete_ = next_ == static_cast<std::size_t>(share_.count);
  if (!complete_) return;
  for (std::size_t b = 0; b < reduced_.size(); ++b)
    reduced_[b] =
        ordered_sum(*group_, micro_batches_[b]).mul_(1.0 / share_.total).to(micro_batches_[b].front().scalar_type());
  const auto notes = ordered_sum(*group_, micro_batches_.back());
  std::ranges::copy(elements_of(notes), notes_.numbers().begin());
}

void OrderedExchange::fetch(std::size_t index, at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const auto& slice = layout_.slices[index];
  copy_or_assign(view_like(parameters_[index], reduced_[slice.bucket], slice.first_element), gradient);
}

}  // namespace muster::detail::gradients
