#include "gradients/bucket_exchange.hpp"

#include "comm/wait.hpp"
#include "node/shared_segment.hpp"
#include "watch/trace.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <functional>
#include <numeric>
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
  GradBucket gradients;     ///< given to the communication hook
  at::Tensor flat;          ///< the gradients, then `notes`
  at::Tensor notes;         ///< the number of each gradient in Notes, then in the first bucket all other numbers
  std::size_t missing = 0;  ///< number of gradients that add() has not been called with in this round
  c10::intrusive_ptr<c10d::Work> work = {};
  watch::TraceEvent event = {};  ///< begins when the bucket's all-reduce starts, for a trace
};

BucketExchange::BucketExchange(const std::vector<at::Tensor>& parameters, Communicator communicator,
                               c10::intrusive_ptr<c10d::ProcessGroup> group, const ModelOptions& options)
    : Exchange(parameters.size(), group->getSize()),
      communicator_(std::move(communicator)),
      group_(std::move(group)),
      options_(options),
      scale_(at::scalar_tensor(1.0 / group_->getSize(), at::kDouble)),
      parameters_(parameters),
      types_(parameters, by_type_and_device(parameters)) {
  for (const auto& [members, count] : types_.buckets)
    memory_.push_back(
        buffer_for(*group_, static_cast<std::int64_t>(count + (1 + node::cache_line) * members.size() + Notes::tail),
                   parameters[members.front()].options().requires_grad(false)));
  std::vector<std::size_t> order(parameters.size());
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  fill_buckets(order);
}

BucketExchange::~BucketExchange() = default;

/// `order`: indices of parameters, in the order in which backward() is expected to make their gradients.
void BucketExchange::fill_buckets(const std::vector<std::size_t>& order) {
  std::vector<GradientSize> sizes;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    sizes.push_back({parameters_[i].nbytes(), static_cast<int>(types_.slices[i].bucket)});
  layout_ = FlatLayout(parameters_, assign_buckets(sizes, order, options_.first_bucket_bytes, options_.bucket_bytes));
  buckets_.clear();
  std::vector<std::size_t> taken(memory_.size());
  for (const auto& [members, count] : layout_.buckets) {
    const auto type = types_.slices[members.front()].bucket;
    const auto sums = members.size() + (buckets_.empty() ? Notes::tail : 0);
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
                        .notes = part(count, sums)});
    taken[type] += node::whole_lines(count + sums);  // in elements; whole cache lines even if an element is one byte
  }
}

void BucketExchange::begin_round() {
  if (!new_order_.empty()) fill_buckets(std::exchange(new_order_, {}));
  for (auto& bucket : buckets_) bucket.missing = bucket.gradients.views.size();
  started_ = ended_ = 0;
}

void BucketExchange::add_gradient(std::size_t index, const at::Tensor& gradient, ParameterUse use) {
  const at::NoGradGuard no_grad;
  note_arrival(index, use);
  const auto& slice = layout_.slices[index];
  auto& bucket = buckets_[slice.bucket];
  auto values = bucket.gradients.views[slice.index_in_bucket];
  if (gradient.defined())
    at::mul_out(values, gradient, scale_);
  else
    values.zero_();
  --bucket.missing;
  start_full_buckets();
  advance();
}

/// Calls call() with each number that the bucket sends with its gradients.
void BucketExchange::for_notes_of(std::size_t bucket, const std::function<void(float& number)>& call) {
  for (const auto i : layout_.buckets[bucket].members) call(notes_.numbers()[i]);
  if (bucket == 0) std::ranges::for_each(notes_.numbers().last(Notes::tail), call);
}

void BucketExchange::start_full_buckets() {
  for (; started_ < buckets_.size() && buckets_[started_].missing == 0; ++started_) {
    auto& full = buckets_[started_];
    std::vector<float> notes;
    for_notes_of(started_, [&](float& number) { notes.push_back(number); });
    full.notes.copy_(at::tensor(notes));
    // A hook averages the gradients in finish(), so only the notes are summed here: a hook could compress them.
    std::vector<at::Tensor> tensors{options_.comm_hook ? full.notes : full.flat};
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
  if (buckets_.empty()) notes_.begin(0, 0);
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    buckets_[b].work->wait();
    buckets_[b].work.reset();
    const auto sums = buckets_[b].notes.abs().to(at::kCPU, at::kFloat);
    for_notes_of(b, [next = sums.const_data_ptr<float>()](float& number) mutable { number = *next++; });
  }
  if (options_.comm_hook)
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      auto& gradients = buckets_[b].gradients;
      gradients.used.clear();
      for (const auto i : layout_.buckets[b].members) gradients.used.push_back(notes_.user_count(i) != 0);
      options_.comm_hook(gradients, *group_);
    }
  fix_order();
}

/// Sets the order in which gradients are expected, once it is known.
void BucketExchange::fix_order() {
  const auto order = find_order([&](std::vector<std::int64_t>& own) {
    std::vector<at::Tensor> from_first{at::tensor(own).to(parameters_.front().device())};
    group_->broadcast(from_first)->wait();
    const auto first = from_first.front().cpu();
    std::copy_n(first.const_data_ptr<std::int64_t>(), own.size(), own.begin());
  });
  // At first it is from the last parameter to the first. Buckets that stay keep their memory for the hook.
  if (!std::ranges::is_sorted(order, std::ranges::greater())) new_order_.assign(order.begin(), order.end());
}

void BucketExchange::fetch(std::size_t index, at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const auto& slice = layout_.slices[index];
  copy_or_assign(buckets_[slice.bucket].gradients.views[slice.index_in_bucket], gradient);
}

}  // namespace muster::detail::gradients
