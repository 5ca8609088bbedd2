// Pure functions for the samples of an epoch: which samples, in which order, on which rank. No state, no I/O.
//
// The order of the samples is the same on every rank. A step takes the next samples in that order and divides them
// among the ranks. So a position is one number, the samples taken; it does not depend on the number of ranks or the
// batch size.
#pragma once

#include "data/passes/alias_table.hpp"
#include "data/passes/lanes.hpp"
#include "data/passes/length_buckets.hpp"
#include "data/sources/ahead.hpp"
#include "data/sources/permutation.hpp"
#include "data/sources/sample_layout.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::data {

/// How the samples of one pass are ordered.
struct OrderOptions {
  bool shuffle = false;     ///< permute all samples
  Blocks blocks = {};       ///< with `shuffle`: how the samples are stored; with 0 rows, the order ignores it
  std::int64_t bucket = 0;  ///< with `shuffle`: samples of a bucket of like length; 0: no buckets
  std::shared_ptr<const Lengths> lengths = {};     ///< with `bucket`: the lengths of all samples
  std::shared_ptr<const AliasTable> weights = {};  ///< probabilities of random draws; null: each sample comes once
  std::int64_t window = 0;                         ///< samples of a window, permuted within it; 0: no local shuffle.
  ///< No effect with `weights`, or with lanes
  std::uint64_t seed = 0;            ///< seed of the shuffle
  std::uint64_t window_seed = 0;     ///< seed of the local shuffle
  std::int64_t epoch = 0, pass = 0;  ///< every pass of every epoch has a different order
};

/// The sample at each position of a pass.
class Order {
 public:
  /// `size`: samples of the pass. They are all of the dataset, or any number of draws by OrderOptions::weights.
  Order(std::int64_t size, const OrderOptions& options);
  std::int64_t operator()(std::int64_t position) const;
  std::int64_t size() const noexcept { return size_; }
  /// Null if the order does not care how the samples are stored.
  const Lanes* lanes() const noexcept { return lanes_.get(); }
  /// The random seed for a batch that begins at `position`, different in each pass of each epoch.
  std::uint64_t random_seed(std::int64_t position) const noexcept;

 private:
  std::int64_t size_, window_;
  std::uint64_t window_key_, random_key_, draw_key_;
  std::optional<Permutation> shuffle_;
  std::shared_ptr<const Lanes> lanes_;
  std::shared_ptr<const LengthBuckets> buckets_;
  std::shared_ptr<const AliasTable> weights_;
};

/// The samples of one step, as one rank sees them.
struct StepSamples {
  std::int64_t position = 0;  ///< position of the step's first sample
  std::int64_t samples = 0;   ///< samples that the step takes, over all ranks
  SampleRange mine;           ///< the rank's part of the step, as positions; count 0 if it has none
};
/// The step that begins at `position` < size. It takes `global_batch` samples, or the rest if there are fewer.
StepSamples step_at(std::int64_t position, std::int64_t size, std::int64_t global_batch, int world, int rank) noexcept;
/// Steps from `position` to the end.
std::int64_t num_steps(std::int64_t position, std::int64_t size, std::int64_t global_batch, bool drop_last) noexcept;
/// The samples that the rank reads: its own. A rank without samples reads the step's first one, to have input. With
/// lanes, a step's samples are divided among the ranks lane by lane.
std::vector<std::int64_t> samples_of(const StepSamples& step, const Order& order);

/// Rows `first` … `last` − 1 of a lane.
struct LaneRange {
  int lane = 0;
  std::int64_t first = 0, last = 0;
};
/// The rank's own rows in the step, by lane; none if it has no samples.
std::vector<LaneRange> lanes_of(const StepSamples& step, const Lanes& lanes);

/// A block that a lane comes to next.
struct ExpectedBlock {
  std::int64_t sample = 0;  ///< one of the block's samples
  int lane = 0;
  std::int64_t first = 0;  ///< the lane's row with which the block begins
};
/// The blocks to decode or to request, as `how` says, in a step that reads `rows`. A block is due to be decoded at one
/// of the rows of the block before it (Lanes::block_to_read_ahead()), and to be requested a quarter of a block's rows
/// earlier.
std::vector<ExpectedBlock> blocks_to_expect(std::span<const LaneRange> rows, const Lanes& lanes, Ahead how);

}  // namespace muster::detail::data
