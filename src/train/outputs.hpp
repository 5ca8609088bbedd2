// What a session puts out: checkpoints, and to its sinks what they want to know.
#pragma once

#include "checkpoint/store.hpp"
#include "muster/config.hpp"
#include "observe/sinks.hpp"

#include <optional>

namespace muster::detail::train {

struct Outputs {
  checkpoint::Store store;
  observe::Sinks sinks;
  CheckpointConfig config;
  bool first_worker = false;
  std::optional<Checkpoint> newest = {};  ///< committed in this attempt, else what it goes on from
  bool score_reported = false;            ///< the metric by which the best checkpoints are kept
  bool score_missed = false;              ///< and that it is not there with a checkpoint has been said

  /// Collective.
  void commit(const checkpoint::Contents& contents);
  /// An Error where a checkpoint would be saved with this row, and the score by which the best are kept is no number
  /// in it or in no report at all. In the middle of an epoch it may be yet to come, as what is measured at its end.
  void check_score(const Json& row, bool saves, bool epoch_complete);
};

}  // namespace muster::detail::train
