#include "gradients/bucket_exchange.hpp"

#include "comm/wait.hpp"
#include "node/shared_segment.hpp"
#include "watch/trace.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

namespace muster::detail::gradients {
namespace {

/// Returns a new tensor: in the backend's own memory if it offers any, since it transfers that fastest. Collective.
at::Tensor buffer_for(c10d::ProcessGroup& group, std::int64_t elements, const at::TensorOptions& options) {
  const auto backend = group.getBackend(options.device().type());
  const auto device = options.device().has_index() ? options.device().index() : c10::DeviceIndex{0};
  return backend->supportsTensorAlloc(device) ? backend->allocateTensor(elements, options)
                                              : at::empty({elements}, options);
}

}  // namespace

struct BucketExchange::Bucket {
  GradBucket gradients;  ///< given to the communication hook
  at::Tensor flat;       ///< the gradients, then `used`
  /// One number for each gradient, then in the first bucket `note_count` numbers for flags and weight. Before the
  /// all-reduce, this rank's numbers (summand_of(), put_notes()); afterwards their sums over the ranks.
  at::Tensor used;
  std::vector<float> users;  ///< the numbers of `used`, on the CPU
  std::size_t missing = 0;   ///< number of gradients that add() has not been called with in this round
  c10::intrusive_ptr<c10d::Work> work = {};
  watch::TraceEvent event = {};  ///< begins when the bucket's all-reduce starts, for a trace
};

BucketExchange::BucketExchange(const std::vector<at::Tensor>& parameters, Communicator communicator,
                               c10::intrusive_ptr<c10d::ProcessGroup> group, const ModelOptions& options)
    : communicator_(std::move(communicator)),
      group_(std::move(group)),
      hook_(options.comm_hook),
      first_bytes_(options.first_bucket_bytes),
      most_bytes_(options.bucket_bytes),
      scale_(at::scalar_tensor(1.0 / group_->getSize(), at::kDouble)),
      parameters_(parameters),
      types_(parameters, by_type_and_device(parameters)),
      order_(parameters.size()) {
  for (const auto& [members, count] : types_.buckets)
    memory_.push_back(
        buffer_for(*group_, static_cast<std::int64_t>(count + (1 + node::cache_line) * members.size() + note_count),
                   parameters[members.front()].options().requires_grad(false)));
  std::iota(order_.rbegin(), order_.rend(), std::size_t{0});
  fill_buckets();
}

BucketExchange::~BucketExchange() = default;

void BucketExchange::fill_buckets() {
  std::vector<GradientSize> sizes;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    sizes.push_back({parameters_[i].nbytes(), static_cast<int>(types_.slices[i].bucket)});
  layout_ = FlatLayout(parameters_, assign_buckets(sizes, order_, first_bytes_, most_bytes_));
  buckets_.clear();
  std::vector<std::size_t> taken(memory_.size());
  for (const auto& [members, count] : layout_.buckets) {
    const auto type = types_.slices[members.front()].bucket;
    const auto sums = members.size() + (buckets_.empty() ? note_count : 0);
    const auto part = [&](std::size_t first, std::size_t elements) {
      return memory_[type].narrow(0, static_cast<std::int64_t>(taken[type] + first),
                                  static_cast<std::int64_t>(elements));
    };
    const auto gradients = part(0, count);
    std::vector<at::Tensor> views;
    for (const auto i : members) views.push_back(view_like(parameters_[i], gradients, layout_.slices[i].first_element));
    const auto index = buckets_.size();
    buckets_.push_back({.gradients = {gradients, std::move(views), index, index + 1 == layout_.buckets.size()},
                        .flat = part(0, count + sums),
                        .used = part(count, sums),
                        .users = std::vector<float>(sums)});
    taken[type] += node::whole_lines(count + sums);  // in elements; whole cache lines even if an element is one byte
  }
}

void BucketExchange::begin(Arrival arrival, Flags flags, double weight) {
  if (std::exchange(order_changed_, false)) fill_buckets();
  if (!buckets_.empty()) put_notes(flags, weight, std::span(buckets_.front().users).last(note_count));
  for (auto& bucket : buckets_) bucket.missing = bucket.gradients.views.size();
  started_ = ended_ = 0;
  arrival_ = arrival;
  arrived_.clear();
}

void BucketExchange::add(std::size_t index, const at::Tensor& gradient, ParameterUse use) {
  const at::NoGradGuard no_grad;
  if (!order_fixed_ && use != ParameterUse::abandoned) arrived_.push_back(static_cast<std::int64_t>(index));
  const auto& slice = layout_.slices[index];
  auto& bucket = buckets_[slice.bucket];
  auto values = bucket.gradients.views[slice.index_in_bucket];
  if (gradient.defined())
    at::mul_out(values, gradient, scale_);
  else
    values.zero_();
  bucket.users[slice.index_in_bucket] = summand_of(use);
  --bucket.missing;
  start_full_buckets();
  advance();
}

void BucketExchange::start_full_buckets() {
  for (; started_ < buckets_.size() && buckets_[started_].missing == 0; ++started_) {
    auto& full = buckets_[started_];
    full.used.copy_(at::from_blob(full.users.data(), {static_cast<std::int64_t>(full.users.size())}, at::kFloat));
    // A hook averages the gradients in finish(), so only `used` is summed here: a hook could compress it.
    std::vector<at::Tensor> tensors{hook_ ? full.used : full.flat};
    full.event = {.name = "reduce bucket",
                  .track = watch::TraceTrack::buckets,
                  .begin_ns = watch::trace_begin(),
                  .number = static_cast<std::int64_t>(started_),
                  .bytes = static_cast<std::int64_t>(full.flat.nbytes())};
    full.work = group_->allreduce(tensors);
  }
}

/// Polls the all-reduces that have started: some backends advance them only then.
void BucketExchange::advance() {
  for (auto i = ended_; i < started_; ++i)
    if (buckets_[i].work->isCompleted() && i == ended_) {
      ++ended_;
      watch::record_until_now(buckets_[i].event);
    }
}

void BucketExchange::finish() {
  const at::NoGradGuard no_grad;
  // wait_on() also returns, by an Error, if another rank fails; work->wait() of some backends would not.
  comm::wait_on(
      communicator_,
      [&] {
        advance();
        return ended_ == buckets_.size();
      },
      [] { return std::string(averaging); });
  for (auto& bucket : buckets_) {
    bucket.work->wait();
    bucket.work.reset();
    const auto users = bucket.used.abs().to(at::kCPU, at::kFloat);
    std::copy_n(users.const_data_ptr<float>(), bucket.users.size(), bucket.users.begin());
  }
  if (hook_)
    for (auto& bucket : buckets_) {
      auto& gradients = bucket.gradients;
      gradients.used.resize(gradients.views.size());
      for (std::size_t i = 0; i < gradients.used.size(); ++i) gradients.used[i] = users_of(bucket.users[i]) != 0;
      hook_(gradients, *group_);
    }
  fix_order();
}

/// Sets the order in which gradients are expected to the order in which the first rank added them, once that rank has
/// added all gradients during one backward().
void BucketExchange::fix_order() {
  if (order_fixed_ || parameters_.empty()) return;
  auto order = at::full({static_cast<std::int64_t>(parameters_.size())}, -1, at::kLong);
  if (arrival_ == Arrival::in_backward && arrived_.size() == parameters_.size())
    std::copy(arrived_.begin(), arrived_.end(), order.mutable_data_ptr<std::int64_t>());
  std::vector<at::Tensor> from_first{order.to(parameters_.front().device())};
  group_->broadcast(from_first)->wait();
  order = from_first.front().cpu();
  const auto* const first = order.const_data_ptr<std::int64_t>();
  if (*first < 0) return;
  order_fixed_ = true;
  arrived_ = {};
  order_changed_ = !std::equal(order_.begin(), order_.end(), first,
                               [](std::size_t a, std::int64_t b) { return static_cast<std::int64_t>(a) == b; });
  order_.assign(first, first + parameters_.size());
}

int BucketExchange::user_count(std::size_t index) const {
  const auto& slice = layout_.slices[index];
  return users_of(buckets_[slice.bucket].users[slice.index_in_bucket]);
}

Flags BucketExchange::flags() const {
  return buckets_.empty() ? 0 : flags_of(std::span(buckets_.front().users).last(note_count).first(flag_bits));
}

double BucketExchange::mean_weight() const {
  if (buckets_.empty()) return 0;
  return weight_of(std::span(buckets_.front().users).last(weight_bits)) / group_->getSize();
}

void BucketExchange::fetch(std::size_t index, at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const auto& slice = layout_.slices[index];
  copy_or_assign(buckets_[slice.bucket].gradients.views[slice.index_in_bucket], gradient);
}

}  // namespace muster::detail::gradients
