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

/// Returns the reason why a link in a run's folder must not have this name; none if it may.
std::optional<std::string> problem_with_name(const std::string& name);
/// Makes a link of this name in the run's folder, to the checkpoint there; does nothing if the name is empty. A failure
/// only logs a warning. Call it on one rank.
void link_name(const std::filesystem::path& checkpoint, const std::string& name) noexcept;

class Validation;

/// What a session writes: checkpoints, and events for the observers. Holds the places that it writes to, and what has
/// been written.
struct Outputs {
  std::optional<Communicator> control;  ///< communicator of the workers; none in a session that saves nothing
  std::optional<checkpoint::CheckpointStore> store;  ///< none in a session that saves nothing, such as a validation's
  observe::Observers observers;
  CheckpointConfig config;
  int histogram_interval = 0;        ///< every how many reports histograms are logged; 0 for never
  Validation* validation = nullptr;  ///< null without a validation function
  bool is_first_worker = false;
  std::optional<Checkpoint> newest = {};  ///< the last that was committed; at first, the one resumed from or validated
  bool has_saved = false;                 ///< true if this attempt has saved `newest`
  /// The checkpoint that a save in the background is writing; none if there is no such save.
  std::optional<Checkpoint> async_checkpoint = {};
  std::string async_checkpoint_name = {};  ///< the user's name for async_checkpoint; may be empty
  bool score_reported = false;  ///< true if a report had checkpoint_score_attribute, or a validation may give it
  bool has_warned_of_missing_score = false;  ///< true if a warning has said that a checkpoint lacks the score

  /// Returns a function that puts the result of a validation into the row of a report. Call it on the first worker.
  std::function<void(std::int64_t training_iteration, const Json& fields)> row_updater();
  /// Commits a checkpoint and returns it; a background thread may still write it. Collective.
  Checkpoint commit(checkpoint::CheckpointContents contents, checkpoint::CheckpointStore::Mode mode);
  /// Waits for the save in the background; throws if it has failed. Collective.
  MUSTER_INTERNAL_API void wait_for_save();
  /// Returns the newest committed checkpoint. Waits for the save in the background, but leaves its error to
  /// wait_for_save(). Not collective.
  std::optional<Checkpoint> wait_for_newest() const;
  /// Like wait_for_save(), but logs the error as a warning. Not collective.
  void wait_for_save_and_warn() noexcept;
  /// Notes whether a report's row has the score by which the best checkpoints are chosen. If the report `saves` a
  /// checkpoint, throws an Error if the score is not a number (NaN is allowed), or if no report has had it so far. In
  /// the middle of an epoch, the missing score is only a warning, since a program may measure it at the end of the
  /// epoch; so it is if an earlier report had the score. Warns once.
  void check_score(const Json& row, bool saves, bool epoch_complete);

 private:
  /// Waits for the save in the background, without telling the observers. Returns false if there is none. Throws if it
  /// has failed. Not collective.
  bool finish_save();
};

}  // namespace muster::detail::session
