#include "gradients/ordered_exchange.hpp"

#include "gradients/ordered_sum.hpp"
#include "muster/error.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace muster::detail::gradients {

OrderedExchange::OrderedExchange(const std::vector<at::Tensor>& parameters,
                                 c10::intrusive_ptr<c10d::ProcessGroup> group, const step::Share& share,
                                 std::shared_ptr<const step::Steps> steps)
    : group_(std::move(group)), share_(share), steps_(std::move(steps)) {
  for (const auto& parameter : parameters) {
    const auto options = parameter.options().requires_grad(false);
    auto kind = std::find_if(kinds_.begin(), kinds_.end(), [&](const Kind& known) {
      return known.options.dtype() == options.dtype() && known.options.device() == options.device();
    });
    if (kind == kinds_.end()) kind = kinds_.insert(kind, {options});
    places_.push_back({static_cast<std::size_t>(kind - kinds_.begin()), kind->elements, parameter});
    kind->elements += parameter.numel();
  }
  kinds_.push_back({at::TensorOptions(at::kFloat), static_cast<std::int64_t>(parameters.size()) + flag_bits});
  for (auto& kind : kinds_)
    for (int s = 0; s < share_.count; ++s) kind.shards.push_back(at::empty({kind.elements}, kind.options));
}

at::Tensor OrderedExchange::part(const at::Tensor& flat, const Place& place) const {
  const auto piece = flat.narrow(0, place.first, place.parameter.numel());
  return place.parameter.is_non_overlapping_and_dense()
             ? piece.as_strided(place.parameter.sizes(), place.parameter.strides())
             : piece.view(place.parameter.sizes());
}

void OrderedExchange::begin(Arrival, Flags flags) {
  const auto refuse = [](const char* fact) {
    throw Error(ExitCode::user_error, "averaging gradients of virtual workers", fact,
                "Run one backward() for each batch of a split dataset");
  };
  const auto& batch = steps_->batch();
  if (batch.global == 0) refuse("no batch of a split dataset is in hand");
  const bool again = std::exchange(left_, false) && batch.number == batch_;
  if (batch.number == batch_ && !again) refuse("this batch has had its backward()");
  shard_ = static_cast<std::size_t>(batch.micro_batch);
  // A step that was left before its end is forgotten with the first shard of the next.
  if (shard_ != 0 && !again && (shard_ != next_ || batch.number != batch_ + 1))
    refuse("a batch of the step had no backward()");
  batch_ = batch.number;
  next_ = shard_ + 1;
  auto* const bits = kinds_.back().shards[shard_].mutable_data_ptr<float>() + places_.size();
  for (int bit = 0; bit < flag_bits; ++bit) bits[bit] = static_cast<float>(flags >> bit & 1);
}

void OrderedExchange::add(std::size_t index, const at::Tensor& gradient, Use use) {
  const at::NoGradGuard no_grad;
  const auto& place = places_[index];
  left_ = left_ || use == Use::abandoned;
  auto values = part(kinds_[place.kind].shards[shard_], place);
  if (gradient.defined())
    values.copy_(gradient);
  else
    values.zero_();
  kinds_.back().shards[shard_].mutable_data_ptr<float>()[index] =
      use == Use::abandoned ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(use == Use::used);
}

void OrderedExchange::finish() {
  const at::NoGradGuard no_grad;
  complete_ = next_ == static_cast<std::size_t>(share_.count);
  if (!complete_) return;
  for (auto& kind : kinds_) {
    kind.sum = ordered_sum(*group_, kind.shards);
    if (&kind != &kinds_.back()) kind.sum.mul_(1.0 / share_.total);
  }
}

int OrderedExchange::users(std::size_t index) const {
  const float users = kinds_.back().sum.const_data_ptr<float>()[index];
  return std::isnan(users) ? -1 : static_cast<int>(users);
}

Flags OrderedExchange::flags() const {
  const auto* const bits = kinds_.back().sum.const_data_ptr<float>() + places_.size();
  Flags all = 0;
  for (int bit = 0; bit < flag_bits; ++bit) all |= static_cast<Flags>(bits[bit] > 0) << bit;
  return all;
}

void OrderedExchange::fetch(std::size_t index, at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const auto& place = places_[index];
  const auto values = part(kinds_[place.kind].sum, place);
  if (gradient.defined())
    gradient.copy_(values);
  else
    gradient = values.clone();
}

}  // namespace muster::detail::gradients
