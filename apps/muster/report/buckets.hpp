// Shortens a long series to a limited number of buckets while it is being read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace muster::tool::report {

/// A list of buckets with the same number of consecutive values; the last may have fewer. When there are too many,
/// neighbours are merged, so that memory does not grow with the series. A Bucket has merge(const Bucket& later).
template <class Bucket>
class Buckets {
 public:
  explicit Buckets(std::size_t most) : most_(std::max<std::size_t>(most, 2)) {}

  void add(const Bucket& value) {
    if (values_in_last_ < values_in_bucket_ && !buckets_.empty()) {
      buckets_.back().merge(value);
      ++values_in_last_;
      return;
    }
    if (buckets_.size() == most_) halve();
    if (values_in_last_ < values_in_bucket_ && !buckets_.empty())
      buckets_.back().merge(value), ++values_in_last_;
    else
      buckets_.push_back(value), values_in_last_ = 1;
  }

  /// Merges neighbours until there are at most `most` buckets.
  void reduce_to(std::size_t most) {
    while (buckets_.size() > std::max<std::size_t>(most, 2)) halve();
  }

  const std::vector<Bucket>& all() const { return buckets_; }

 private:
  void halve() {
    const bool is_odd = buckets_.size() % 2 == 1;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < buckets_.size(); i += 2) {
      if (kept != i) buckets_[kept] = buckets_[i];
      if (i + 1 < buckets_.size()) buckets_[kept].merge(buckets_[i + 1]);
      ++kept;
    }
    buckets_.resize(kept);
    if (!is_odd) values_in_last_ += values_in_bucket_;
    values_in_bucket_ *= 2;
  }

  std::size_t most_;
  std::size_t values_in_bucket_ = 1, values_in_last_ = 0;
  std::vector<Bucket> buckets_ = {};
};

}  // namespace muster::tool::report
