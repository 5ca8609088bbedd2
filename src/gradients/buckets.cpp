#include "gradients/buckets.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace muster::detail::gradients {
namespace {

struct Filling {
  std::size_t limit = 0;
  std::size_t bytes = 0;
  std::size_t last = 0;  ///< place in the order of what came last
  std::vector<std::size_t> indices = {};
};

}  // namespace

std::vector<std::vector<std::size_t>> assign_buckets(std::span<const GradientSize> gradients,
                                                     std::span<const std::size_t> order, std::size_t first_bytes,
                                                     std::size_t bytes) {
  std::vector<Filling> full;
  std::map<int, Filling> filling;  // the one of each kind that still has room
  for (std::size_t place = 0; place < order.size(); ++place) {
    const auto& gradient = gradients[order[place]];
    auto& bucket = filling.try_emplace(gradient.kind, Filling{first_bytes}).first->second;
    if (!bucket.indices.empty() && bucket.bytes + gradient.bytes > bucket.limit) {
      full.push_back(std::move(bucket));
      bucket = {bytes};
    }
    bucket.indices.push_back(order[place]);
    bucket.bytes += gradient.bytes;
    bucket.last = place;
  }
  for (auto& [kind, bucket] : filling) full.push_back(std::move(bucket));
  // A bucket is ready with its last gradient.
  std::sort(full.begin(), full.end(), [](const auto& a, const auto& b) { return a.last < b.last; });
  std::vector<std::vector<std::size_t>> buckets;
  for (auto& bucket : full) buckets.push_back(std::move(bucket.indices));
  return buckets;
}

}  // namespace muster::detail::gradients
