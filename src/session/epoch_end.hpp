// Decides whether a checkpoint that is saved now marks its epoch as complete. A run that goes on from it begins the
// next epoch then, and otherwise the same one again, at the position in the data.
#pragma once

#include "session/prepared_models.hpp"
#include "session/session_data.hpp"
#include "session/training_progress.hpp"
#include "session/worker_context.hpp"

#include <array>
#include <cstdint>

namespace muster::detail::session {

/// Tells whether a save now is at the end of an epoch. muster knows the position in data that it reads itself. Of other
/// data it knows only how often gradients have been averaged: the first report in an epoch counts as the epoch's end,
/// since most programs report there. Once a program has trained between two reports of one epoch, this is not assumed
/// any more.
class EpochEnd {
 public:
  EpochEnd(const WorkerContext& workers, const TrainingProgress& progress, const SessionData& data,
           const PreparedModels& models)
      : workers_(workers), progress_(progress), data_(data), models_(models) {}

  /// Call when an epoch of the loop over session.epochs() begins.
  void begin_epoch();
  /// Call at each report, before is_complete().
  void note_report(bool has_state);
  bool is_complete() const;
  /// Undoes note_report() for a report that has failed. `before`: a copy from before it.
  void set_back(const EpochEnd& before) noexcept;
  /// True if the program has trained between two reports with a State in one epoch. Saved with the checkpoints.
  bool has_several_reports() const noexcept { return trained_between_reports_[1]; }
  void restore(bool has_several_reports) noexcept { trained_between_reports_[1] = has_several_reports; }

 private:
  /// Where the last report was.
  struct LastReport {
    std::int64_t epoch = -1;
    std::int64_t averaged = 0;  ///< averages of gradients until the report
  };
  /// True if this epoch trains on data that muster does not read itself.
  bool trains_on_unknown_data() const;

  const WorkerContext& workers_;
  const TrainingProgress& progress_;
  const SessionData& data_;
  const PreparedModels& models_;
  // Index 0: reports without a State; 1: with one.
  std::array<LastReport, 2> last_reports_ = {};
  std::array<bool, 2> trained_between_reports_ = {};
  std::int64_t averaged_before_ = 0;  ///< averages of gradients until the epoch began
  bool is_mid_epoch_ = false;         ///< the last report may be in the middle of its epoch
  bool has_warned_ = false;
};

}  // namespace muster::detail::session
