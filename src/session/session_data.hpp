#pragma once

#include "base/export.hpp"
#include "data/passes/pass_positions.hpp"
#include "data/passes/shard.hpp"
#include "muster/config.hpp"
#include "muster/preprocessor.hpp"
#include "session/worker_context.hpp"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::session {

/// The session's datasets: it divides them among the workers, applies the preprocessor and keeps the positions of
/// passes.
struct SessionData {
  std::map<std::string, Dataset> datasets;
  DataConfig config;
  PreprocessorPtr preprocessor;  ///< may be null
  std::shared_ptr<data::PassPositions> pass_positions;
  std::map<std::string, std::shared_ptr<data::ShardState>> shards = {};
  bool has_warned_of_unsplit_data = false;

  /// Returns the dataset's shard, which the first call makes. Throws an Error if there is no dataset of this name.
  MUSTER_INTERNAL_API std::shared_ptr<data::ShardState> shard(const std::string& name, const WorkerContext& workers);
  /// Applies the preprocessor to all datasets, after its state was loaded or it was fitted. `saved`: its state in a
  /// checkpoint, or null. `own`: true if the checkpoint is this run's, false if this run only starts from it. The saved
  /// state of this run is always loaded, that of another run only if the preprocessor is not fitted yet. Without a
  /// saved state, fits the preprocessor to the dataset "train" unless it is fitted on all workers. `had_one`: whether
  /// the checkpoint was saved with a preprocessor, if that is known: throws an Error if this run's checkpoint had one
  /// and the trainer has none, or the reverse. Collective.
  void prepare_preprocessor(const Json& saved, bool own, const Communicator& control, std::optional<bool> had_one = {});
  /// Returns where the samples of the datasets are that draw them, by name; empty if there is none. Collective.
  Json ledgers(const Communicator& workers) const;
  /// Warns once if a confusion matrix counts each sample once per worker because a dataset is not split. `metrics`: of
  /// all workers, the same on each of them.
  void warn_of_unsplit_data(const std::vector<Json>& metrics, const WorkerContext& workers);
};

}  // namespace muster::detail::session
