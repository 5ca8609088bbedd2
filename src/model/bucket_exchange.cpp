#include "model/bucket_exchange.hpp"

#include "model/buckets.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace muster::model {
namespace {

/// In the memory that the group's backend moves best, if it has its own. Collective.
at::Tensor buffer_for(c10d::ProcessGroup& group, std::int64_t elements, const at::TensorOptions& options) {
  const auto backend = group.getBackend(options.device().type());
  const auto device = options.device().has_index() ? options.device().index() : c10::DeviceIndex{0};
  return backend->supportsTensorAlloc(device) ? backend->allocateTensor(elements, options)
                                              : at::empty({elements}, options);
}

}  // namespace

struct BucketExchange::Bucket {
  std::size_t gradients = 0;
  std::size_t missing = 0;
  at::Tensor flat;           ///< the gradients, then `used`
  at::Tensor used;           ///< [gradients], in the end on how many ranks each was used; NaN: a rank has left
  std::vector<float> users;  ///< [gradients], the same on the CPU
  c10::intrusive_ptr<c10d::Work> work = {};
  GradBucket hooked;  ///< what a hook sees of it
};

BucketExchange::BucketExchange(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
                               const ModelOptions& options)
    : group_(std::move(group)),
      hook_(options.comm_hook),
      scale_(at::scalar_tensor(1.0 / group_->getSize(), at::kDouble)),
      places_(parameters.size()) {
  std::vector<GradientSize> sizes;
  for (const auto& parameter : parameters) {
    const auto same_kind = std::find_if(parameters.begin(), parameters.end(), [&](const at::Tensor& other) {
      return other.scalar_type() == parameter.scalar_type() && other.device() == parameter.device();
    });
    sizes.push_back({parameter.nbytes(), static_cast<int>(same_kind - parameters.begin())});
  }
  const auto assigned = assign_buckets(sizes, options.first_bucket_bytes, options.bucket_bytes);
  for (const auto& chosen : assigned) {
    std::int64_t elements = 0;
    for (const auto i : chosen) elements += parameters[i].numel();
    const auto count = static_cast<std::int64_t>(chosen.size());
    const auto flat = buffer_for(*group_, elements + count, parameters[chosen.front()].options().requires_grad(false));
    std::int64_t offset = 0;
    std::vector<at::Tensor> views;
    for (std::size_t number = 0; number < chosen.size(); ++number) {
      const auto& parameter = parameters[chosen[number]];
      const auto piece = flat.narrow(0, offset, parameter.numel());
      // In the parameter's own order of memory, so that copies run straight through.
      places_[chosen[number]] = {buckets_.size(), number,
                                 parameter.is_non_overlapping_and_dense()
                                     ? piece.as_strided(parameter.sizes(), parameter.strides())
                                     : piece.view(parameter.sizes())};
      views.push_back(places_[chosen[number]].values);
      offset += parameter.numel();
    }
    buckets_.push_back({.gradients = chosen.size(),
                        .flat = flat,
                        .used = flat.narrow(0, elements, count),
                        .users = std::vector<float>(chosen.size()),
                        .hooked = {flat.narrow(0, 0, elements), std::move(views), buckets_.size(),
                                   buckets_.size() + 1 == assigned.size()}});
  }
}

BucketExchange::~BucketExchange() = default;

void BucketExchange::begin() {
  for (auto& bucket : buckets_) bucket.missing = bucket.gradients;
  issued_ = 0;
}

void BucketExchange::add(std::size_t index, const at::Tensor& gradient, Use use) {
  const at::NoGradGuard no_grad;
  auto& place = places_[index];
  auto& bucket = buckets_[place.bucket];
  if (gradient.defined())
    at::mul_out(place.values, gradient, scale_);
  else
    place.values.zero_();
  bucket.users[place.number] =
      use == Use::left ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(use == Use::used);
  --bucket.missing;
  for (; issued_ < buckets_.size() && buckets_[issued_].missing == 0; ++issued_) {
    auto& full = buckets_[issued_];
    full.used.copy_(at::from_blob(full.users.data(), {static_cast<std::int64_t>(full.gradients)}, at::kFloat));
    // A hook leaves `used` alone, which must arrive as it is.
    std::vector<at::Tensor> tensors{hook_ ? full.used : full.flat};
    full.work = group_->allreduce(tensors);
  }
}

void BucketExchange::finish() {
  const at::NoGradGuard no_grad;
  for (auto& bucket : buckets_) {
    bucket.work->wait();
    bucket.work.reset();
    const auto users = bucket.used.abs().to(at::kCPU, at::kFloat);
    std::copy_n(users.const_data_ptr<float>(), bucket.gradients, bucket.users.begin());
  }
  if (hook_)
    for (auto& bucket : buckets_) hook_(bucket.hooked, *group_);
}

int BucketExchange::users(std::size_t index) const {
  const auto& place = places_[index];
  const float users = buckets_[place.bucket].users[place.number];
  return std::isnan(users) ? -1 : static_cast<int>(users);
}

void BucketExchange::fetch(std::size_t index, at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const auto& values = places_[index].values;
  if (gradient.defined())
    gradient.copy_(values);
  else
    gradient = values.clone();
}

}  // namespace muster::model
