// Where a session stands in its datasets and data loaders. The batch in hand is the one that the program got last.
#pragma once

#include "base/export.hpp"
#include "data/passes/pass_order.hpp"
#include "data/passes/samples.hpp"
#include "muster/dataset.hpp"
#include "muster/json.hpp"
#include "step/steps.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::data {

class PassPositions;

/// The parameters of one pass, fixed when it begins.
struct Pass {
  Order order;
  std::int64_t position = 0;  ///< samples before the pass's first one; not 0 if it continues a pass after a resume
  step::StepPlan plan = {};
  step::MicroBatchShare share = {};
  bool training = false;             ///< the pass has a position, and the weights of its batches apply to the gradients
  bool is_already_finished = false;  ///< the pass was finished before the restart, and is empty now
  bool in_loop = false;              ///< the pass began inside the loop over the epochs
  bool is_unsplit = false;           ///< every rank sees all of the data, and step::Steps knows that the pass is open
  std::int64_t epoch = 0;
  std::int64_t number = 0;  ///< counts the passes of the session from 1; 0 until this one has begun

  std::int64_t num_steps() const noexcept {
    return data::num_steps(position, order.size(), plan.global_batch, plan.drop_last);
  }
};

/// The dataset or data loader that a pass position belongs to.
struct PassPositionOptions {
  std::string name;
  step::MicroBatchShare share = {};
  int full_worker_count = 0;  ///< a step takes `full_worker_count` times batch_size, even if fewer workers run; 0: one
                              ///< batch_size per worker
  bool split = true;          ///< false: every rank sees all samples, and there is no position
  std::uint64_t seed = 0;
  bool loader = false;    ///< a data loader, not a dataset
  bool resumable = true;  ///< false for a stream, and for a loader whose samples the user's own sampler chooses
  bool stream = false;    ///< the number of samples is not known

  int batches_in_step() const noexcept { return full_worker_count > 0 ? full_worker_count : share.total; }
  /// True if gradients are weighted by the number of samples in their batches.
  bool weighs() const noexcept { return resumable || stream; }
};

/// The position of the run in one dataset or data loader. There is one pass position per dataset or loader and session,
/// shared by all ranges over it. It belongs to the thread that runs the training function, and works once
/// PassPositions::add() has registered it.
///
/// An epoch is a sequence of passes. The following is about training passes. The last pass begun is under way until it
/// reaches its end, its range is destroyed, or the next pass begins. The position is the number of passes that the
/// epoch had, and the number of samples that the pass under way has taken. After a restore the program runs its epoch
/// again from the start: finished passes come back empty, and the next pass continues after the samples taken. A pass
/// inside a batch of another pass (for example validation every few steps) does not come back, since the program
/// continues after that batch and does not run the inner pass again.
///
/// Passes inside the loop over session.epochs() (for an operator: inside train()) are counted separately from passes
/// outside of it. After a resume, the program may run the passes outside again, or leave out passes that it runs only
/// in a fresh start.
class PassPosition {
 public:
  explicit PassPosition(PassPositionOptions options) : options_(std::move(options)) {}

  const PassPositionOptions& options() const noexcept { return options_; }

  /// Makes `epoch` the current epoch. A position in another epoch is dropped.
  void begin_epoch(std::int64_t epoch);
  /// Called when the training function sets the epoch: the session enters it, and so does every pass position whose
  /// epoch the training function has not set itself.
  void set_epoch(std::int64_t epoch);
  /// Sets the epoch for a loader that does not train. No effect if another loader of the same name has trained, here or
  /// before the restart.
  void set_epoch_if_untrained(std::int64_t epoch);
  /// Called when the training function enters the loop over the epochs.
  void enter_loop();
  /// True if a training pass over a split dataset is under way, or was when the restored position was saved.
  bool unfinished() const noexcept;
  /// The position as JSON, for a checkpoint. The batch in hand counts as taken. Null if the dataset is not split.
  Json position() const;
  /// The next passes continue at `position`, at any number of workers. A pass that was under way keeps its order.
  /// `complete`: the epoch of `position` is over; only the step size and the worker count are kept, to warn of a
  /// change.
  void restore(const Json& position, bool complete = false);

  /// The pass that would begin now.
  Pass plan(const BatchOptions& options, const PassData& data) const;
  /// Begins a pass. `loader` identifies the data loader that begins it; null for a dataset. Throws an Error if a
  /// training pass over another loader of the same name is under way, or if the pass would continue a saved pass over
  /// other data.
  Pass begin_pass(const BatchOptions& options, const PassData& data, const std::shared_ptr<const void>& loader = {});
  /// Called when the program has got `batch` of the pass; its step has `samples` samples over all ranks.
  void begin_batch(const Pass& pass, const step::BatchWeightPtr& batch, std::int64_t samples);
  /// Called when the program is done with the batch in hand and asks for the next one. If a run may stop here, calls
  /// PassPositions::stop_if_asked.
  void stop_if_asked(const Pass& pass) const;
  void end_pass(const Pass& pass);

 private:
  friend class PassPositions;

  /// An epoch and the counts of its training passes.
  struct Epoch {
    std::int64_t number = 0;
    std::int64_t passes = 0;      ///< passes that have ended
    std::int64_t repeated = 0;    ///< passes that a resumed program begins again; at most `passes`
    std::int64_t run_here = 0;    ///< passes of `repeated` that this process has run itself
    std::int64_t to_skip = 0;     ///< passes of `repeated` that have yet to come back empty
    bool ended_in_other = false;  ///< the last pass counted in `repeated` ended while another pass was open
  };
  /// A part of an epoch. The passes that do not train are numbered from 0 in each section. Their random numbers and
  /// their order depend on the section and the number. A resumed run repeats such passes before the training pass that
  /// was under way, but within it only the ones at the remaining steps. Since each step is a section, they get the same
  /// numbers as in a run without a restart.
  struct Section {
    std::int64_t epoch = -1;
    std::int64_t finished = 0;  ///< training passes of the epoch that have ended, over all datasets
    std::int64_t step = 0;      ///< step within the training passes under way, from 1; 0 if none is under way. Outside
    ///< of an operator's train(): at least the number of the trainer's call, from 1
    bool after_loop = false;  ///< the loop over session.epochs() is over
    bool operator==(const Section&) const = default;
    /// A hash of the section, without its epoch, and of the evaluation's number in it: the same in every run, and
    /// hardly ever the same for two evaluations of an epoch.
    std::int64_t number_of(std::int64_t evaluation) const noexcept;
  };
  /// The training pass begun last, here or before the restart.
  struct LastPass {
    std::int64_t number = 0;  ///< 0 if this process has begun none
    bool under_way = false;
    std::int64_t consumed = 0;      ///< samples taken; for a restored pass, the samples taken before the restart
    std::int64_t steps_before = 0;  ///< steps of the run from the beginning of the pass to the restart
    std::int64_t first_step = 0;    ///< the run's step number when the pass began
    PassOrder order = {};           ///< as it was when the pass began
    std::int64_t global_batch = 0;  ///< samples of a step
    int workers = 0;  ///< without global_batch_size, a step takes so many times batch_size; 0: none yet, or not known
    // How the pass is nested in other passes.
    std::vector<step::BatchOfPass> others = {};  ///< the batches of other passes in hand when this pass began
    bool late = false;                           ///< one of `others` was not the first batch of its pass
    bool outside = false;  ///< the saved position shows that the pass is not inside a batch of another pass
  };
  /// What is known about the passes inside the loop over the epochs, or about the passes outside of it.
  struct PassRecord {
    Epoch epoch = {};
    LastPass last = {};
    bool restored = false;        ///< a position was restored, and no pass that trains has begun since
    bool resume_pending = false;  ///< a position inside a pass was restored, and that pass has not been continued yet
    bool skipped = false;         ///< since the restore a pass has come back empty

    // Passes that do not train.
    Section section = {};          ///< the section of the last of these passes
    std::int64_t evaluations = 0;  ///< passes in that section

    /// True if samples are left in the pass under way.
    bool has_rest() const noexcept { return last.under_way && last.consumed < last.order.samples; }
    bool unfinished() const noexcept { return last.under_way || last.consumed > 0; }
    bool none() const noexcept { return last.number == 0 && epoch.passes == 0 && last.consumed == 0; }
    std::int64_t repeated_passes() const noexcept;
    std::int64_t number_of_evaluation(const Section& now) const noexcept;
    void count_evaluation(const Section& now) noexcept;
    void begin_epoch(std::int64_t number);
    Json position(std::int64_t global_step) const;
    void restore(const Json& position);
  };

  PassRecord& passes_of(bool in_loop) noexcept { return in_loop ? in_loop_ : outside_; }
  const PassRecord& passes_of(bool in_loop) const noexcept { return in_loop ? in_loop_ : outside_; }
  /// True if there were passes, and none of them trained.
  bool only_evaluated() const noexcept { return evaluated_ && in_loop_.none() && outside_.none(); }
  /// True if a position was restored and no training pass has begun since.
  bool is_restored() const noexcept { return in_loop_.restored || outside_.restored; }
  bool under_way() const noexcept { return in_loop_.last.under_way || outside_.last.under_way; }
  /// The section of an evaluation pass that would begin now.
  Section section() const;
  /// The order of a new pass over `data`.
  PassOrder order_of_new(const BatchOptions& options, const PassData& data) const;
  void finish(PassRecord& passes);
  std::string named() const;  ///< the beginning of a message about the dataset or loader
  void warn_if_steps_changed(PassRecord& passes, const Pass& pass, const BatchOptions& options);
  /// Throws an Error if the pass that was interrupted cannot go on over `data`.
  void require_same_data(const LastPass& last, const PassData& data) const;
  void warn_if_order_changed(const LastPass& last, const PassOrder& now) const;

  PassPositionOptions options_;
  std::weak_ptr<PassPositions> owner_;
  std::shared_ptr<step::Steps> steps_;
  std::weak_ptr<const void> trained_by_;  ///< the loader that began the last training pass
  PassRecord in_loop_, outside_;
  bool epoch_set_ = false;     ///< the training function has set the epoch
  bool evaluated_ = false;     ///< a pass that does not train has begun, in any epoch
  bool loop_unknown_ = false;  ///< the restored position does not say if its passes were inside the loop
};

/// The pass positions of a session, by the name of the dataset or loader. They belong to the thread that runs the
/// training function.
class MUSTER_INTERNAL_API PassPositions : public std::enable_shared_from_this<PassPositions> {
 public:
  explicit PassPositions(std::shared_ptr<step::Steps> of = std::make_shared<step::Steps>()) : steps(std::move(of)) {}

  const std::shared_ptr<step::Steps> steps;  ///< counts the batches that the passes hand out
  /// Called between two batches of a pass where a run may stop. May save and throw. Empty if nothing stops there.
  std::function<void()> stop_if_asked = {};

  /// Registers a pass position. Throws an Error if a dataset and a loader have the same name, or two loaders of which
  /// one has its own sampler.
  void add(const std::shared_ptr<PassPosition>& pass_position);
  /// Null if no loader has that name.
  std::shared_ptr<PassPosition> find_loader(const std::string& name) const;
  /// Called when the training function enters the loop over the epochs, for all pass positions.
  void enter_loop();
  /// Called when the loop over the epochs begins `epoch`.
  void begin_epoch(std::int64_t epoch);
  /// Called when a run is resumed in `epoch`.
  void resume_epoch(std::int64_t epoch);
  /// Called when the training function has set the epoch of one of the pass positions.
  void set_epoch(std::int64_t epoch);
  /// The positions of split datasets and loaders in this epoch, by name, as JSON.
  Json positions() const;
  /// Restores one position. The dataset or loader may be added before or after.
  void restore(const std::string& name, const Json& position, bool complete);
  enum class EpochProgress { unknown, none, under_way, over };
  /// How far the training passes of this epoch are; unknown if no dataset is split, or if the passes over split
  /// datasets only evaluate.
  EpochProgress epoch_progress() const;
  /// The number of finished training passes of this epoch that a resumed program begins again, over all data.
  std::int64_t finished_passes() const;
  /// Called when a pass begins in an epoch that was saved as complete: the save came between two passes of the epoch.
  void note_more_passes();
  /// Called when an epoch of the loop ends.
  void end_epoch();
  /// The name of a dataset whose training pass is under way and has samples left; empty if there is none.
  std::string name_of_unfinished_pass() const;
  /// The name of a dataset whose position inside a pass was restored, but the program has not begun that pass again
  /// although it has gone through empty passes before it; empty if there is none. `in_loop`: which passes to look at.
  std::string name_of_pass_not_resumed(bool in_loop) const;
  /// The name of a dataset that had passes in this epoch when the run was saved, and that the program has not asked
  /// for since the restart; empty if there is none.
  std::string name_of_unused_position() const;
  /// The section of an evaluation pass that would begin now, inside the loop over the epochs or outside.
  PassPosition::Section section(std::int64_t epoch, bool in_loop) const;

 private:
  struct Saved {
    Json position;
    bool complete;
  };
  void enter_epoch(std::int64_t epoch);

  std::map<std::string, std::shared_ptr<PassPosition>> pass_positions_;
  std::map<std::string, Saved> waiting_;   ///< restored positions whose dataset or loader has not been added yet
  std::int64_t resumed_epoch_ = -1;        ///< epoch where a resumed run goes on; −1 once the program has set one
  std::map<std::string, Saved> restored_;  ///< restored positions whose dataset or loader has been added
};

}  // namespace muster::detail::data
