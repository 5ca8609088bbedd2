#include "data/passes/samples.hpp"

#include <algorithm>

namespace muster::detail::data {
namespace {

enum Purpose : std::uint64_t { shuffling = 1, windows = 2, random_numbers = 3, drawing = 4 };

std::uint64_t key_of(std::uint64_t seed, const OrderOptions& options, Purpose purpose) noexcept {
  return mix(mix(mix(seed, purpose), static_cast<std::uint64_t>(options.epoch)),
             static_cast<std::uint64_t>(options.pass));
}

}  // namespace

Order::Order(std::int64_t size, const OrderOptions& options)
    : size_(size),
      window_(options.window),
      window_key_(key_of(options.window_seed, options, windows)),
      random_key_(key_of(options.seed, options, random_numbers)),
      draw_key_(key_of(options.seed, options, drawing)),
      weights_(options.weights) {
  if (weights_ || !options.shuffle) return;
  const auto key = key_of(options.seed, options, shuffling);
  if (options.bucket > 0)
    buckets_ = std::make_shared<LengthBuckets>(options.lengths, options.bucket, key);
  else if (options.blocks.rows > 0)
    lanes_ = std::make_shared<Lanes>(options.blocks, key);
  else
    shuffle_.emplace(size, key);
}

std::int64_t Order::operator()(std::int64_t position) const {
  if (weights_) {
    const auto number = 2 * static_cast<std::uint64_t>(position);
    return (*weights_)(mix(draw_key_, number), mix(draw_key_, number + 1));
  }
  if (lanes_) return lanes_->row_at(position);
  if (window_ > 0) {
    const std::int64_t number = position / window_, begin = number * window_;
    const Permutation within(std::min(window_, size_ - begin), mix(window_key_, static_cast<std::uint64_t>(number)));
    position = begin + within(position - begin);
  }
  if (buckets_) return (*buckets_)(position);
  return shuffle_ ? (*shuffle_)(position) : position;
}

std::uint64_t Order::random_seed(std::int64_t position) const noexcept {
  return mix(random_key_, static_cast<std::uint64_t>(position));
}

StepSamples step_at(std::int64_t position, std::int64_t size, std::int64_t global_batch, int world, int rank) noexcept {
  StepSamples step{position, std::min(global_batch, size - position), {}};
  step.mine = share_of(step.samples, world, rank);
  step.mine.first += position;
  return step;
}

std::int64_t num_steps(std::int64_t position, std::int64_t size, std::int64_t global_batch, bool drop_last) noexcept {
  const std::int64_t left = std::max<std::int64_t>(0, size - position);
  return left / global_batch + (!drop_last && left % global_batch != 0 ? 1 : 0);
}

std::vector<LaneRange> lanes_of(const StepSamples& step, const Lanes& lanes) {
  const auto first = lanes.taken(step.position), last = lanes.taken(step.position + step.samples);
  std::vector<LaneRange> mine;
  auto before = step.mine.first - step.position;  // samples of the ranks before this one
  for (auto [lane, left] = std::pair(0, step.mine.count); left > 0; ++lane) {
    const auto at = static_cast<std::size_t>(lane);
    const auto begin = first[at] + std::min(before, last[at] - first[at]), end = std::min(last[at], begin + left);
    before -= begin - first[at];
    left -= end - begin;
    if (begin < end) mine.push_back({lane, begin, end});
  }
  return mine;
}

std::vector<std::int64_t> samples_of(const StepSamples& step, const Order& order) {
  if (step.mine.count == 0) return {order(step.position)};
  std::vector<std::int64_t> samples;
  samples.reserve(static_cast<std::size_t>(step.mine.count));
  if (const auto* const lanes = order.lanes()) {
    for (const auto& [lane, first, last] : lanes_of(step, *lanes))
      for (auto row = first; row < last; ++row) samples.push_back(lanes->row(lane, row));
  } else {
    for (std::int64_t i = 0; i < step.mine.count; ++i) samples.push_back(order(step.mine.first + i));
  }
  return samples;
}

std::vector<ExpectedBlock> blocks_to_expect(std::span<const LaneRange> rows, const Lanes& lanes, Ahead how) {
  std::vector<ExpectedBlock> blocks;
  const auto earlier = how == Ahead::request ? lanes.block_rows() / 4 : 0;
  for (const auto& [lane, first, last] : rows)
    if (const auto next = lanes.block_to_read_ahead(lane, first + earlier, last + earlier))
      blocks.push_back({next->row, lane, next->first});
  return blocks;
}

}  // namespace muster::detail::data
