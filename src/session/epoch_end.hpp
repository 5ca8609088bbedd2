// Decides whether a checkpoint marks its epoch as complete. If so, a run that resumes from it begins the next epoch; if
// not, it continues the same epoch at the position in the data.
#pragma once

#include "session/prepared_models.hpp"
#include "session/session_data.hpp"
#include "session/training_progress.hpp"
#include "session/worker_context.hpp"

#include <array>
#include <cstdint>

namespace muster::detail::session {

/// Tells whether a save at this moment is at the end of an epoch. If muster reads the data itself, it knows the
/// position. Of data that the program reads itself, muster only knows how often gradients have been averaged, and
/// without a prepared model not even that. For such data, the first report in an epoch counts as the end of the epoch,
/// since most programs report there. As soon as a program has trained between two reports of one epoch (or has reported
/// twice without a prepared model), no report counts as the end any more. Reports with and without a State are counted
/// separately.
class EpochEnd {
 public:
  EpochEnd(const WorkerContext& workers, const TrainingProgress& progress, const SessionData& data,
           const PreparedModels& models)
      : workers_(workers), progress_(progress), data_(data), models_(models) {}

  /// Call it when an epoch of the loop over session.epochs() begins.
  void begin_epoch();
  /// Call it at each report, before is_complete().
  void note_report(bool has_state);
  bool is_complete() const;
  /// Undoes note_report() for a report that has failed. `before`: a copy of this object made before that call.
  void set_back(const EpochEnd& before) noexcept;
  /// True if the program has trained on data that muster does not read between two reports with a State in one epoch.
  /// Checkpoints hold this.
  bool has_several_reports() const noexcept { return trained_between_reports_[1]; }
  void restore(bool has_several_reports) noexcept { trained_between_reports_[1] = has_several_reports; }

 private:
  /// Where training was at the last report of one kind (with or without a State).
  struct LastReport {
    std::int64_t epoch = -1;
    std::int64_t averaged = 0;  ///< PreparedModels::gradient_average_count() at that report
  };
  /// True if this epoch trains on data that muster does not read.
  bool trains_on_unknown_data() const;

  const WorkerContext& workers_;
  const TrainingProgress& progress_;
  const SessionData& data_;
  const PreparedModels& models_;
  // Element 0 is for reports without a State, element 1 for reports with a State.
  std::array<LastReport, 2> last_reports_ = {};
  std::array<bool, 2> trained_between_reports_ = {};
  std::int64_t averaged_before_ = 0;  ///< PreparedModels::gradient_average_count() when the epoch began
  bool is_mid_epoch_ = false;         ///< true if the last report may be in the middle of its epoch
  bool has_warned_ = false;
};

}  // namespace muster::detail::session
