// A worker's view of one dataset, and where it stands in it.
#pragma once

#include "data/step_weight.hpp"
#include "muster/config.hpp"
#include "muster/dataset.hpp"

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>

namespace muster::data {

/// One per dataset and session, shared by every DatasetShard and BatchRange over it.
struct ShardState {
  std::string name;
  Dataset dataset;
  int rank = 0;
  int world = 1;
  bool split = true;  ///< else every rank sees all of it, and it has no position
  std::uint64_t seed = 0;
  at::Device device = at::kCPU;
  std::shared_ptr<StepWeight> weight;

  // Where it stands. `passes` are those finished in this epoch.
  std::int64_t epoch = 0;
  std::int64_t passes = 0;
  /// The pass under way: samples of the global order that steps have taken, the one in hand counted. Restored ones wait
  /// here for the pass that takes them up.
  std::int64_t consumed = 0;
  /// Samples that shuffle together (a window in the global order), fixed when the pass began: it depends on the number
  /// of workers, which may change.
  std::int64_t window = 0;
  bool in_pass = false;   ///< begun and not finished
  bool resuming = false;  ///< `passes`, `consumed`, `window` came from a checkpoint and wait to be taken up
  std::int64_t passes_to_skip = 0;

  /// Makes `value` the epoch; forgets the position of another one.
  void begin_epoch(std::int64_t value);
  /// The position as JSON, for a checkpoint.
  Config position() const;
  /// The next passes go on there.
  void restore(const Config& position);
};

}  // namespace muster::data
