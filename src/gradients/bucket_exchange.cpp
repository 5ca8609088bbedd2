#include "gradients/bucket_exchange.hpp"

#include "comm/wait.hpp"
#include "gradients/buckets.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace muster::detail::gradients {
namespace {

/// Buckets begin at whole cache lines, of the smallest element.
constexpr std::int64_t line = 64;

/// In the memory that the group's backend moves best, if it has its own. Collective.
at::Tensor buffer_for(c10d::ProcessGroup& group, std::int64_t elements, const at::TensorOptions& options) {
  const auto backend = group.getBackend(options.device().type());
  const auto device = options.device().has_index() ? options.device().index() : c10::DeviceIndex{0};
  return backend->supportsTensorAlloc(device) ? backend->allocateTensor(elements, options)
                                              : at::empty({elements}, options);
}

}  // namespace

/// What gradients of one type on one device have in common.
struct BucketExchange::Kind {
  at::TensorOptions options;
  std::int64_t elements = 0;
  std::int64_t gradients = 0;
  at::Tensor memory = {};  ///< of all of their buckets
};

struct BucketExchange::Bucket {
  std::size_t gradients = 0;
  std::size_t missing = 0;
  at::Tensor flat;  ///< the gradients, then `used`
  /// [gradients], in the end on how many ranks each was used; NaN: a rank has left. In the first bucket also
  /// [flag_bits], how many ranks have given each.
  at::Tensor used;
  std::vector<float> users;  ///< the same on the CPU
  c10::intrusive_ptr<c10d::Work> work = {};
  GradBucket hooked;  ///< what a hook sees of it
};

BucketExchange::BucketExchange(const std::vector<at::Tensor>& parameters, Communicator communicator,
                               c10::intrusive_ptr<c10d::ProcessGroup> group, const ModelOptions& options,
                               bool progress_thread)
    : communicator_(std::move(communicator)),
      group_(std::move(group)),
      hook_(options.comm_hook),
      first_bytes_(options.first_bucket_bytes),
      most_bytes_(options.bucket_bytes),
      scale_(at::scalar_tensor(1.0 / group_->getSize(), at::kDouble)) {
  for (const auto& parameter : parameters) {
    auto kind = std::find_if(kinds_.begin(), kinds_.end(), [&](const Kind& known) {
      return known.options.dtype() == parameter.dtype() && known.options.device() == parameter.device();
    });
    if (kind == kinds_.end()) kind = kinds_.insert(kind, {parameter.options().requires_grad(false)});
    kind->elements += parameter.numel();
    ++kind->gradients;
    places_.push_back({static_cast<std::size_t>(kind - kinds_.begin()), parameter});
  }
  for (auto& kind : kinds_)
    kind.memory = buffer_for(*group_, kind.elements + (1 + line) * kind.gradients + flag_bits, kind.options);
  order_.resize(parameters.size());
  std::iota(order_.rbegin(), order_.rend(), std::size_t{0});
  fill_buckets();
  if (progress_thread) thread_ = std::make_unique<ProgressThread>([this] { return advance(); });
}

BucketExchange::~BucketExchange() = default;

void BucketExchange::fill_buckets() {
  std::vector<GradientSize> sizes;
  for (const auto& place : places_) sizes.push_back({place.parameter.nbytes(), static_cast<int>(place.kind)});
  const auto assigned = assign_buckets(sizes, order_, first_bytes_, most_bytes_);
  buckets_.clear();
  std::vector<std::int64_t> taken(kinds_.size());
  for (const auto& chosen : assigned) {
    const auto kind = places_[chosen.front()].kind;
    std::int64_t elements = 0;
    for (const auto i : chosen) elements += places_[i].parameter.numel();
    const auto count = static_cast<std::int64_t>(chosen.size()) + (buckets_.empty() ? flag_bits : 0);
    const auto flat = kinds_[kind].memory.narrow(0, taken[kind], elements + count);
    taken[kind] += (elements + count + line - 1) / line * line;
    std::int64_t offset = 0;
    std::vector<at::Tensor> views;
    for (std::size_t number = 0; number < chosen.size(); ++number) {
      auto& place = places_[chosen[number]];
      const auto& parameter = place.parameter;
      const auto piece = flat.narrow(0, offset, parameter.numel());
      place.bucket = buckets_.size();
      place.number = number;
      // In the parameter's own order of memory, so that copies run straight through.
      place.values = parameter.is_non_overlapping_and_dense()
                         ? piece.as_strided(parameter.sizes(), parameter.strides(), piece.storage_offset())
                         : piece.view(parameter.sizes());
      views.push_back(place.values);
      offset += parameter.numel();
    }
    buckets_.push_back({.gradients = chosen.size(),
                        .flat = flat,
                        .used = flat.narrow(0, elements, count),
                        .users = std::vector<float>(static_cast<std::size_t>(count)),
                        .hooked = {flat.narrow(0, 0, elements), std::move(views), buckets_.size(),
                                   buckets_.size() + 1 == assigned.size()}});
  }
}

void BucketExchange::begin(Arrival arrival, Flags flags) {
  if (std::exchange(moved_, false)) fill_buckets();
  if (!buckets_.empty()) {
    auto& first = buckets_.front();
    for (std::size_t bit = 0; bit < flag_bits; ++bit)
      first.users[first.gradients + bit] = static_cast<float>(flags >> bit & 1);
  }
  for (auto& bucket : buckets_) bucket.missing = bucket.gradients;
  issued_ = ended_ = 0;
  arrival_ = arrival;
  arrived_.clear();
  if (thread_ && arrival == Arrival::in_backward) thread_->start();
}

void BucketExchange::add(std::size_t index, const at::Tensor& gradient, Use use) {
  const at::NoGradGuard no_grad;
  if (!frozen_ && use != Use::abandoned) arrived_.push_back(static_cast<std::int64_t>(index));
  auto& place = places_[index];
  auto& bucket = buckets_[place.bucket];
  if (gradient.defined())
    at::mul_out(place.values, gradient, scale_);
  else
    place.values.zero_();
  bucket.users[place.number] =
      use == Use::abandoned ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(use == Use::used);
  --bucket.missing;
  start_full_buckets();
  if (!thread_) advance();
}

void BucketExchange::start_full_buckets() {
  if (issued_ == buckets_.size() || buckets_[issued_].missing > 0) return;
  const auto lock = thread_ ? thread_->hold() : std::unique_lock<std::mutex>();
  for (; issued_ < buckets_.size() && buckets_[issued_].missing == 0; ++issued_) {
    auto& full = buckets_[issued_];
    full.used.copy_(at::from_blob(full.users.data(), {static_cast<std::int64_t>(full.users.size())}, at::kFloat));
    // A hook leaves `used` alone, which must arrive as it is.
    std::vector<at::Tensor> tensors{hook_ ? full.used : full.flat};
    full.work = group_->allreduce(tensors);
  }
}

bool BucketExchange::advance() {
  const auto before = ended_;
  for (auto i = ended_; i < issued_; ++i)
    if (buckets_[i].work->isCompleted() && i == ended_) ++ended_;
  return ended_ != before;
}

void BucketExchange::finish() {
  const at::NoGradGuard no_grad;
  if (thread_) thread_->stop();
  // Whatever the backend, another rank's error ends the wait.
  comm::wait_for(
      communicator_,
      [&] {
        advance();
        return ended_ == buckets_.size();
      },
      [] { return std::string("averaging gradients"); });
  for (auto& bucket : buckets_) {
    bucket.work->wait();
    bucket.work.reset();
    const auto users = bucket.used.abs().to(at::kCPU, at::kFloat);
    std::copy_n(users.const_data_ptr<float>(), bucket.users.size(), bucket.users.begin());
  }
  if (hook_)
    for (auto& bucket : buckets_) hook_(bucket.hooked, *group_);
  freeze_order();
}

/// Gradients are expected in the order in which they came on the first rank in the first whole backward().
void BucketExchange::freeze_order() {
  if (frozen_ || places_.empty()) return;
  auto order = at::full({static_cast<std::int64_t>(places_.size())}, -1, at::kLong);
  if (arrival_ == Arrival::in_backward && arrived_.size() == places_.size())
    std::copy(arrived_.begin(), arrived_.end(), order.mutable_data_ptr<std::int64_t>());
  std::vector<at::Tensor> from_first{order.to(places_.front().parameter.device())};
  group_->broadcast(from_first)->wait();
  order = from_first.front().cpu();
  const auto* const first = order.const_data_ptr<std::int64_t>();
  if (*first < 0) return;
  frozen_ = true;
  arrived_ = {};
  moved_ = !std::equal(order_.begin(), order_.end(), first,
                       [](std::size_t a, std::int64_t b) { return static_cast<std::int64_t>(a) == b; });
  order_.assign(first, first + places_.size());
}

int BucketExchange::users(std::size_t index) const {
  const auto& place = places_[index];
  const float users = buckets_[place.bucket].users[place.number];
  return std::isnan(users) ? -1 : static_cast<int>(users);
}

Flags BucketExchange::flags() const {
  Flags all = 0;
  if (buckets_.empty()) return all;
  const auto& first = buckets_.front();
  for (std::size_t bit = 0; bit < flag_bits; ++bit)
    all |= static_cast<Flags>(first.users[first.gradients + bit] > 0) << bit;
  return all;
}

void BucketExchange::fetch(std::size_t index, at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const auto& values = places_[index].values;
  if (gradient.defined())
    gradient.copy_(values);
  else
    gradient = values.clone();
}

}  // namespace muster::detail::gradients
