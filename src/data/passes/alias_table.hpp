// Random draws with given probabilities, each in constant time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace muster::detail::data {

/// An alias table: Walker, "An efficient method for generating discrete random variables with general distributions"
/// (ACM TOMS 3, 1977), made in linear time as in Vose, "A linear algorithm for generating random numbers with a given
/// distribution" (IEEE TSE 17, 1991). The weights become whole numbers whose sum is about 2^62, and from there on
/// everything is exact. So the table is the same on every machine, and a weight of 0 is never drawn.
class AliasTable {
 public:
  /// `weights`: at least one, finite, ≥ 0, not all 0.
  explicit AliasTable(std::span<const double> weights);

  std::int64_t size() const noexcept { return static_cast<std::int64_t>(columns_.size()); }
  /// The item drawn by two independent random numbers of 64 bits.
  std::int64_t operator()(std::uint64_t column, std::uint64_t coin) const noexcept;
  /// A hash of the weights.
  std::uint64_t hash() const noexcept { return hash_; }

 private:
  /// Item i is drawn if column i is chosen and the coin, a number below `total_`, is below `own`; otherwise `alias`.
  struct Column {
    std::uint64_t own = 0;
    std::uint64_t alias = 0;
  };
  std::vector<Column> columns_;
  std::uint64_t total_ = 0;
  std::uint64_t hash_ = 0;
};

}  // namespace muster::detail::data
