// A random order in which samples of like length come together.
#pragma once

#include "data/sources/permutation.hpp"
#include "data/sources/sample_layout.hpp"

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace muster::detail::data {

/// The shuffled samples are divided into windows. The samples of a window are sorted by length and cut into buckets.
/// The buckets come in random order, except for a last one that is short, and the samples of a bucket in random order.
class LengthBuckets {
 public:
  static constexpr std::int64_t buckets_of_window = 100;

  /// `bucket`: samples of a bucket, at least 1.
  LengthBuckets(std::shared_ptr<const Lengths> lengths, std::int64_t bucket, std::uint64_t key);

  /// The sample at a position, 0 ≤ position < number of samples. Thread-safe. Makes the order of the whole window and
  /// keeps it until a position in another window is asked for.
  std::int64_t operator()(std::int64_t position) const;

 private:
  std::vector<std::int64_t> order_of_window(std::int64_t number) const;

  const std::shared_ptr<const Lengths> lengths_;
  const std::int64_t size_, bucket_, window_;
  const std::uint64_t key_;
  const Permutation shuffle_;
  mutable std::mutex mutex_;
  mutable std::int64_t number_ = -1;           ///< of the window that is kept
  mutable std::vector<std::int64_t> samples_;  ///< of that window, in order
};

}  // namespace muster::detail::data
