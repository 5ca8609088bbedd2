#include "model/buckets.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace muster::model {
namespace {

struct Filling {
  std::size_t limit = 0;
  std::size_t bytes = 0;
  std::vector<std::size_t> indices = {};
};

}  // namespace

std::vector<std::vector<std::size_t>> assign_buckets(std::span<const GradientSize> gradients, std::size_t first_bytes,
                                                     std::size_t bytes) {
  std::vector<std::vector<std::size_t>> buckets;
  std::map<int, Filling> filling;  // the one of each kind that still has room
  for (std::size_t i = gradients.size(); i-- > 0;) {
    const auto& gradient = gradients[i];
    auto& bucket = filling.try_emplace(gradient.kind, Filling{first_bytes}).first->second;
    if (!bucket.indices.empty() && bucket.bytes + gradient.bytes > bucket.limit) {
      buckets.push_back(std::move(bucket.indices));
      bucket = {bytes};
    }
    bucket.indices.push_back(i);
    bucket.bytes += gradient.bytes;
  }
  for (auto& [kind, bucket] : filling) buckets.push_back(std::move(bucket.indices));
  // A bucket is ready with its last gradient, and the gradient of the lowest index is made last.
  std::sort(buckets.begin(), buckets.end(), [](const auto& a, const auto& b) { return a.back() > b.back(); });
  return buckets;
}

}  // namespace muster::model
