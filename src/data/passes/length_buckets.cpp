#include "data/passes/length_buckets.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::data {

LengthBuckets::LengthBuckets(std::shared_ptr<const Lengths> lengths, std::int64_t bucket, std::uint64_t key)
    : lengths_(std::move(lengths)),
      size_(static_cast<std::int64_t>(lengths_->of_samples.size())),
      bucket_(std::min(bucket, std::max<std::int64_t>(1, size_))),
      window_(bucket_ > size_ / buckets_of_window ? std::max<std::int64_t>(1, size_) : bucket_ * buckets_of_window),
      key_(key),
      shuffle_(size_, key) {}

std::int64_t LengthBuckets::operator()(std::int64_t position) const {
  const auto number = position / window_;
  const std::lock_guard lock(mutex_);
  if (number != number_) {
    samples_ = order_of_window(number);
    number_ = number;
  }
  return samples_[static_cast<std::size_t>(position - number * window_)];
}

std::vector<std::int64_t> LengthBuckets::order_of_window(std::int64_t number) const {
  const auto begin = number * window_, count = std::min(window_, size_ - begin);
  std::vector<std::int64_t> sorted;
  sorted.reserve(static_cast<std::size_t>(count));
  for (auto position = begin; position < begin + count; ++position) sorted.push_back(shuffle_(position));
  std::ranges::stable_sort(sorted, {},
                           [&](std::int64_t sample) { return lengths_->of_samples[static_cast<std::size_t>(sample)]; });

  const auto key = mix(key_, 1 + static_cast<std::uint64_t>(number));
  const auto whole = count / bucket_;  // a short bucket comes last, so that steps and buckets coincide
  const Permutation of_buckets(whole, mix(key, 0));
  std::vector<std::int64_t> ordered;
  ordered.reserve(sorted.size());
  for (std::int64_t place = 0; place * bucket_ < count; ++place) {
    const auto bucket = place < whole ? of_buckets(place) : place;
    const auto first = bucket * bucket_, rows = std::min(bucket_, count - first);
    const Permutation of_rows(rows, mix(key, 1 + static_cast<std::uint64_t>(bucket)));
    for (std::int64_t row = 0; row < rows; ++row)
      ordered.push_back(sorted[static_cast<std::size_t>(first + of_rows(row))]);
  }
  return ordered;
}

}  // namespace muster::detail::data
