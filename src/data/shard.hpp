// A worker's view of one dataset, and where it stands in it.
#pragma once

#include "data/samples.hpp"
#include "data/step_weight.hpp"
#include "muster/config.hpp"
#include "muster/dataset.hpp"

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace muster::data {

/// What one pass takes, fixed when it begins.
struct Pass {
  Order order;
  std::int64_t position = 0;  ///< where it begins, not 0 after a resume
  std::int64_t global_batch = 1;
  StepShare share = {};
  bool drop_last = false;
  std::int64_t ticket = 0;  ///< which pass of its shard it is; 0 for one that a checkpoint has seen finished

  std::int64_t num_steps() const noexcept { return data::num_steps(position, order.size(), global_batch, drop_last); }
};

/// One per dataset and session, shared by every DatasetShard and BatchRange over it; belongs to the thread that runs
/// the training function.
///
/// An epoch is a sequence of passes. The last one begun is under way until its range gives no more batches or dies,
/// or until the next one begins. The position is the number of passes finished and the samples that the one under way
/// has taken; restored, the finished ones come back empty and the next goes on after those samples, so the program may
/// run its epoch again from the start.
struct ShardState {
  std::string name;
  Dataset dataset;
  StepShare share = {};
  bool split = true;  ///< else every rank sees all of it, and it has no position
  std::uint64_t seed = 0;
  at::Device device = at::kCPU;
  std::shared_ptr<StepWeight> weight = std::make_shared<StepWeight>();
  /// Told of each batch of a split dataset as it is handed out: the step's samples over all ranks.
  std::function<void(std::int64_t)> on_batch = {};
  /// Told when a pass over a split dataset has ended.
  std::function<void()> on_end = {};
  /// Told of an epoch that the training function has set.
  std::function<void(std::int64_t)> on_epoch = {};

  /// Makes `value` the epoch; forgets the position in another one.
  void begin_epoch(std::int64_t value);
  /// Whether a pass of a split dataset is under way, or was when the position was saved that has been restored.
  bool unfinished() const noexcept;
  /// The position as JSON, for a checkpoint; the batch in hand counts as taken. Null if the dataset is not split.
  Config position() const;
  /// The next passes go on there, at any number of workers and in the order of the seed that the run began with.
  void restore(const Config& position);

  // For the ranges.
  Pass begin_pass(const BatchOptions& options);
  /// `batch` of the pass is in hand: which of the rank's shards of its step.
  void take(const Pass& pass, const Batch& batch, int shard);
  void end_pass(const Pass& pass);

  std::int64_t epoch = 0;
  std::int64_t passes = 0;        ///< finished in this epoch
  std::int64_t replays = 0;       ///< of those, the ones that have yet to come back empty
  std::int64_t ticket = 0;        ///< of the pass begun last
  bool under_way = false;         ///< that pass
  std::int64_t consumed = 0;      ///< samples that it has taken, or that a restored one had
  std::int64_t window = 0;        ///< of its local shuffle: depends on the number of workers when it began
  std::int64_t global_batch = 0;  ///< of its steps
  std::int64_t samples = 0;       ///< of the dataset, as it began
};

}  // namespace muster::data
