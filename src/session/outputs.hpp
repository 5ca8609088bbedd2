#pragma once

#include "base/export.hpp"
#include "checkpoint/store.hpp"
#include "muster/communicator.hpp"
#include "muster/config.hpp"
#include "observe/observers.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

namespace muster::detail::session {

/// The reason why a link in a run's folder must not have this name; none if it may.
std::optional<std::string> problem_with_name(const std::string& name);
/// Makes a link of that name to the checkpoint, unless the name is empty. Call on one rank. A failure is a warning.
void link_name(const std::filesystem::path& checkpoint, const std::string& name) noexcept;

class Validation;

/// What a session writes: checkpoints, and events for the observers. Many members: where it writes to, and what
/// it has written so far.
struct Outputs {
  std::optional<Communicator> control;               ///< the workers; none in a session that saves nothing
  std::optional<checkpoint::CheckpointStore> store;  ///< none in a session that saves nothing, such as a validation
  observe::Observers observers;
  CheckpointConfig config;
  int histogram_interval = 0;        ///< reports from one with histograms to the next; 0: none
  Validation* validation = nullptr;  ///< null without a validation function
  bool is_first_worker = false;
  std::optional<Checkpoint> newest = {};            ///< this attempt's newest, or the one that it goes on from
  bool has_saved = false;                           ///< `newest` was saved in this attempt
  std::optional<Checkpoint> async_checkpoint = {};  ///< the one that is being written while training goes on
  std::string async_checkpoint_name = {};           ///< the user's name for it when it is written; may be empty
  bool score_reported = false;                      ///< a report had the metric by which the best checkpoints are kept
  bool has_warned_of_missing_score = false;         ///< the warning that a checkpoint lacks that metric was given

  /// A function that puts the result of a validation into the row of a report. Call it on the first worker.
  std::function<void(std::int64_t training_iteration, const Json& fields)> row_updater();
  /// Commits a checkpoint and returns it; it may still be being written. Collective.
  Checkpoint commit(checkpoint::CheckpointContents contents, checkpoint::CheckpointStore::Mode mode);
  /// Waits for the checkpoint that is being written; throws if it could not be written. Collective.
  MUSTER_INTERNAL_API void wait_for_save();
  /// The newest committed checkpoint. Waits for the one that is being written, but leaves its error to wait_for_save().
  /// Not collective.
  std::optional<Checkpoint> wait_for_newest() const;
  /// wait_for_save(), with the error as a warning. Not collective.
  void wait_for_save_and_warn() noexcept;
  /// Checks that a checkpoint with this row has the score by which the best ones are kept. Throws an Error if the score
  /// is not a number, or if no report has had it. In the middle of an epoch the latter is only a warning, since a
  /// program may measure the score at the end of the epoch.
  void check_score(const Json& row, bool saves, bool epoch_complete);

 private:
  /// Waits for the checkpoint that is being written and tells no observer of it. False if none is. Throws if it could
  /// not be written. Not collective.
  bool finish_save();
};

}  // namespace muster::detail::session
