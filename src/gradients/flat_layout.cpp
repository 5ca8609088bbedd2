#include "gradients/flat_layout.hpp"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace muster::detail::gradients {
namespace {

struct Filling {
  std::size_t limit = 0;
  std::size_t bytes = 0;
  std::size_t last = 0;  ///< position in `order` of the bucket's last gradient
  std::vector<std::size_t> indices = {};
};

}  // namespace

FlatLayout::FlatLayout(const std::vector<at::Tensor>& parameters, std::vector<std::vector<std::size_t>> members)
    : slices(parameters.size()) {
  for (auto& in_bucket : members) {
    std::size_t count = 0;
    for (std::size_t number = 0; number < in_bucket.size(); ++number) {
      auto& slice = slices[in_bucket[number]];
      slice = {buckets.size(), number, count, static_cast<std::size_t>(parameters[in_bucket[number]].numel())};
      count += slice.element_count;
    }
    buckets.push_back({std::move(in_bucket), count});
  }
}

std::vector<std::vector<std::size_t>> by_type_and_device(const std::vector<at::Tensor>& parameters) {
  std::map<std::tuple<at::ScalarType, at::DeviceType, at::DeviceIndex>, std::vector<std::size_t>> found;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto device = parameters[i].device();
    found[{parameters[i].scalar_type(), device.type(), device.index()}].push_back(i);
  }
  std::vector<std::vector<std::size_t>> members;
  for (auto& [key, some] : found) members.push_back(std::move(some));
  return members;
}

std::vector<std::vector<std::size_t>> assign_buckets(std::span<const GradientSize> gradients,
                                                     std::span<const std::size_t> order, std::size_t first_bytes,
                                                     std::size_t bytes) {
  std::vector<Filling> full;
  std::map<int, Filling> filling;  // for each kind, the bucket that is being filled
  for (std::size_t position = 0; position < order.size(); ++position) {
    const auto& gradient = gradients[order[position]];
    auto& bucket = filling.try_emplace(gradient.kind, Filling{first_bytes}).first->second;
    if (!bucket.indices.empty() && bucket.bytes + gradient.bytes > bucket.limit) {
      full.push_back(std::move(bucket));
      bucket = {bytes};
    }
    bucket.indices.push_back(order[position]);
    bucket.bytes += gradient.bytes;
    bucket.last = position;
  }
  for (auto& [kind, bucket] : filling) full.push_back(std::move(bucket));
  // backward() completes a bucket when it makes the bucket's last gradient.
  std::sort(full.begin(), full.end(), [](const auto& a, const auto& b) { return a.last < b.last; });
  std::vector<std::vector<std::size_t>> buckets;
  for (auto& bucket : full) buckets.push_back(std::move(bucket.indices));
  return buckets;
}

at::Tensor view_like(const at::Tensor& parameter, const at::Tensor& bucket, std::size_t first) {
  const auto piece = bucket.narrow(0, static_cast<std::int64_t>(first), parameter.numel());
  return parameter.is_non_overlapping_and_dense() ? piece.as_strided(parameter.sizes(), parameter.strides())
                                                  : piece.view(parameter.sizes());
}

}  // namespace muster::detail::gradients
