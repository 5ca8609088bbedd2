#include "data/sources/window_mask.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <utility>

namespace muster::detail::data {
namespace {

constexpr std::int64_t piece_values = 1 << 20;  ///< of the mask that are read at once

/// Sums of `size` values along a dimension, every `stride` of them. The dimension becomes the number of sums.
at::Tensor sums_along(const at::Tensor& values, std::int64_t dimension, std::int64_t size, std::int64_t stride) {
  auto shape = values.sizes().vec();
  const auto length = std::exchange(shape[static_cast<std::size_t>(dimension)], 1);
  const auto up_to = at::cat({at::zeros(shape, values.options()), values.cumsum(dimension)}, dimension);
  return up_to.slice(dimension, size, length + 1, stride).sub(up_to.slice(dimension, 0, length + 1 - size, stride));
}

/// Decides whether the mask leaves a window, for each window along the mask's dimensions, in the order of coordinates.
class MaskReader {
 public:
  MaskReader(const WindowVariable& mask, double share, const WindowShape& shape)
      : mask_(mask), share_(share), shape_(shape) {
    for (const auto d : mask.dimensions()) values_ *= static_cast<double>(shape.size[d]);
  }

  std::vector<bool> read() {
    const at::NoGradGuard no_grad;
    const auto first = mask_.dimensions().front();
    const auto rows = shape_.array[first];
    auto pieces = shape_;  // windows of some rows of the mask each, side by side
    std::ranges::fill(pieces.margin, 0);
    pieces.size = pieces.stride = pieces.array;
    std::int64_t row_values = 1;
    for (const auto d : mask_.dimensions()) row_values *= d == first ? 1 : shape_.array[d];
    pieces.size[first] = pieces.stride[first] = std::clamp<std::int64_t>(piece_values / row_values, 1, rows);
    std::vector<std::int64_t> at(shape_.array.size(), 0);
    for (auto& piece = at[first]; piece * pieces.size[first] < rows; ++piece) {
      // Rows beyond the end of the mask are NaN or 0.
      const auto values = mask_.read(WindowCoordinates(&at, 1), pieces, pool_).squeeze(0);
      auto counts = values.ne(0).logical_and(values.eq(values)).to(at::kLong);
      for (std::size_t d = 1; d < mask_.dimensions().size(); ++d) {
        const auto of = mask_.dimensions()[d];
        counts = sums_along(counts, static_cast<std::int64_t>(d), shape_.size[of], shape_.stride[of]);
      }
      const auto here = std::min(pieces.size[first], rows - piece * pieces.size[first]);
      for (std::int64_t row = 0; row < here; ++row) add_row(counts[row]);
    }
    return std::move(is_left_);
  }

 private:
  /// Adds the counts of the mask's next row to the sum of the last `size` rows.
  void add_row(const at::Tensor& counts) {
    const auto first = mask_.dimensions().front();
    last_rows_.push_back(counts);
    sum_ = sum_.defined() ? sum_.add(counts) : counts;
    if (std::ssize(last_rows_) > shape_.size[first]) {
      sum_ = sum_.sub(last_rows_.front());
      last_rows_.pop_front();
    }
    const auto begin = rows_++ - shape_.size[first] + 1;
    if (begin < 0 || begin % shape_.stride[first] != 0) return;
    const auto sums = sum_.contiguous();
    for (std::int64_t i = 0; i < sums.numel(); ++i)
      is_left_.push_back(static_cast<double>(sums.const_data_ptr<std::int64_t>()[i]) / values_ >= share_);
  }

  const WindowVariable& mask_;
  double share_;
  const WindowShape& shape_;
  double values_ = 1;  ///< of the mask in a window
  TensorPool pool_;
  std::int64_t rows_ = 0;
  std::deque<at::Tensor> last_rows_;
  at::Tensor sum_;
  std::vector<bool> is_left_;
};

}  // namespace

NumberSet::NumberSet(std::int64_t limit) : bits_(static_cast<std::size_t>((limit + block - 1) / block * block / 64)) {}

void NumberSet::add(std::int64_t number) {
  before_.resize(static_cast<std::size_t>(number / block) + 1, size_);
  bits_[static_cast<std::size_t>(number / 64)] |= std::uint64_t{1} << (number % 64);
  ++size_;
}

std::int64_t NumberSet::operator[](std::int64_t index) const {
  const auto after = std::ranges::upper_bound(before_, index);
  auto word = static_cast<std::size_t>(after - before_.begin() - 1) * (block / 64);
  index -= *(after - 1);
  for (; index >= std::popcount(bits_[word]); ++word) index -= std::popcount(bits_[word]);
  auto bits = bits_[word];
  for (; index > 0; --index) bits &= bits - 1;
  return static_cast<std::int64_t>(word) * 64 + std::countr_zero(bits);
}

NumberSet windows_of_mask(const WindowVariable& mask, double share, const WindowShape& shape, const WindowGrid& grid) {
  const auto is_left = MaskReader(mask, share, shape).read();
  const auto counts = shape.counts();
  NumberSet windows(grid.size());
  for (std::int64_t number = 0; number < grid.size(); ++number) {
    // Windows at the same place along the dimensions of the mask are the same for it.
    const auto at = grid.coordinates(number);
    std::int64_t place = 0;
    for (const auto d : mask.dimensions()) place = place * counts[d] + at[d];
    if (is_left[static_cast<std::size_t>(place)]) windows.add(number);
  }
  return windows;
}

}  // namespace muster::detail::data
