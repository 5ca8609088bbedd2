#include "data/passes/lanes.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

namespace muster::detail::data {
namespace {

/// Up to this many rows, the whole permutation of a block is drawn: Permutation is slow for so few.
constexpr std::int64_t few = 16;

std::int64_t place_among_few(std::int64_t size, std::uint64_t key, std::int64_t index) noexcept {
  std::array<std::int8_t, few> order{};
  std::iota(order.begin(), order.end(), std::int8_t{0});
  for (auto left = static_cast<std::size_t>(size); left > 1; --left)
    std::swap(order[left - 1], order[mix(key, left) % left]);
  return order[static_cast<std::size_t>(index)];
}

std::int64_t shuffled(std::int64_t size, std::uint64_t key, std::int64_t index) noexcept {
  return size <= few ? place_among_few(size, key, index) : Permutation(size, key)(index);
}

std::int64_t total(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

}  // namespace

Lanes::Lanes(const Blocks& blocks, std::uint64_t key)
    : size_(total(blocks.files)),
      block_rows_(std::min(blocks.rows, std::max<std::int64_t>(1, size_))),
      blocks_(size_ == 0 ? 0 : (size_ - 1) / block_rows_ + 1),
      last_rows_(size_ - std::max<std::int64_t>(0, blocks_ - 1) * block_rows_),
      last_slot_(blocks_ == 0 ? 0 : static_cast<std::int64_t>(mix(key, 0) % static_cast<std::uint64_t>(blocks_))),
      key_(key),
      block_order_(std::max<std::int64_t>(1, blocks_ - 1), mix(key, 1)) {
  std::int64_t whole = 0, rest = 0, row = 0;
  for (const auto rows : blocks.files) {
    first_row_.push_back(row);
    first_whole_.push_back(whole);
    first_rest_.push_back(rest);
    row += rows;
    whole += rows / block_rows_ * block_rows_;
    rest += rows % block_rows_;
  }
  for (auto& first : first_rest_) first += whole;

  const auto lanes = std::min<std::int64_t>(blocks.lanes, blocks_);
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    const auto blocks_of_lane = blocks_ / lanes + (lane < blocks_ % lanes ? 1 : 0);
    lengths_.push_back(blocks_of_lane * block_rows_ - (last_slot_ % lanes == lane ? block_rows_ - last_rows_ : 0));
  }
}

std::int64_t Lanes::rounds_before(std::int64_t position) const noexcept {
  const auto rows_in = [&](std::int64_t rounds) {
    std::int64_t rows = 0;
    for (const auto length : lengths_) rows += std::min(length, rounds);
    return rows;
  };
  std::int64_t least = 0, beyond = std::ranges::max(lengths_) + 1;
  while (beyond - least > 1) {
    const auto middle = least + (beyond - least) / 2;
    (rows_in(middle) <= position ? least : beyond) = middle;
  }
  return least;
}

std::vector<std::int64_t> Lanes::taken(std::int64_t position) const {
  auto taken = lengths_;
  if (position >= size_) return taken;
  const auto rounds = rounds_before(position);
  for (auto& rows : taken) position -= std::min(rows, rounds);
  for (auto& rows : taken) rows = rows <= rounds ? rows : position-- > 0 ? rounds + 1 : rounds;
  return taken;
}

std::int64_t Lanes::row_at(std::int64_t position) const {
  const auto rounds = rounds_before(position);
  for (const auto length : lengths_) position -= std::min(length, rounds);
  int lane = 0;
  for (;; ++lane)
    if (length(lane) > rounds && position-- == 0) return row(lane, rounds);
}

Lanes::Place Lanes::place_of(int lane, std::int64_t index) const noexcept {
  const auto before_last = last_slot_ / count();  // the lane's blocks before the short one
  if (last_slot_ % count() == lane && index >= before_last * block_rows_) {
    const auto offset = index - before_last * block_rows_;
    if (offset < last_rows_) return {before_last, offset};
    return {before_last + 1 + (offset - last_rows_) / block_rows_, (offset - last_rows_) % block_rows_};
  }
  return {index / block_rows_, index % block_rows_};
}

std::int64_t Lanes::block_at(std::int64_t slot) const noexcept {
  return slot == last_slot_ ? blocks_ - 1 : block_order_(slot < last_slot_ ? slot : slot - 1);
}

std::int64_t Lanes::row(int lane, std::int64_t index) const noexcept {
  const auto place = place_of(lane, index);
  const auto slot = lane + place.block * count();
  const auto block = block_at(slot);
  const auto rows = slot == last_slot_ ? last_rows_ : block_rows_;
  return row_of(block * block_rows_ + shuffled(rows, mix(key_, 2 + static_cast<std::uint64_t>(block)), place.offset));
}

std::int64_t Lanes::row_of(std::int64_t number) const noexcept {
  const bool whole = number < first_rest_.front();
  const auto& first = whole ? first_whole_ : first_rest_;
  // Files without rows of this kind have the same first number as the file after them.
  const auto file = static_cast<std::size_t>(std::ranges::upper_bound(first, number) - first.begin() - 1);
  const auto rows_before =
      whole ? 0 : (file + 1 < first.size() ? first_whole_[file + 1] : first_rest_.front()) - first_whole_[file];
  return first_row_[file] + rows_before + number - first[file];
}

std::optional<Lanes::NextBlock> Lanes::block_to_read_ahead(int lane, std::int64_t first,
                                                           std::int64_t last) const noexcept {
  while (first < last) {
    const auto [block, offset] = place_of(lane, first);
    const auto slot = lane + block * count();
    const auto rows = slot == last_slot_ ? last_rows_ : block_rows_;
    const auto left = (rows + 6) / 8;  // 0 of one row, else at least 1
    const auto turn = (rows - left) * (lane + 1) / (count() + 1);
    if (offset <= turn && turn - offset < last - first) {
      const auto next = slot + count();
      if (next >= blocks_) return {};
      return NextBlock{.row = row_of(block_at(next) * block_rows_), .first = first + rows - offset};
    }
    first += rows - offset;
  }
  return {};
}

}  // namespace muster::detail::data
