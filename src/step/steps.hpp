// The steps of a run: which batch the gradients belong to now, which training passes are open, which epoch it is, and
// how many steps have been taken. The data room reports passes and batches, the reducer reads the batch's weight, and
// the session reads the counts.
#pragma once

#include "step/batch_weight.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::step {

using BatchWeightPtr = std::shared_ptr<const BatchWeight>;

/// How a pass is cut into steps. Two passes with the same plan and position have batches of equal weight, unless they
/// are over streams, whose length is unknown.
struct StepPlan {
  std::int64_t samples = 0;       ///< samples of the dataset; 0 for a stream
  std::int64_t global_batch = 0;  ///< samples per step; 0 if the user's own sampler chooses them
  bool drop_last = false;
  bool is_stream() const noexcept { return samples == 0 && global_batch > 0; }
  bool operator==(const StepPlan&) const = default;
};

/// A training pass that has begun and has not ended.
struct OpenPass {
  std::int64_t number = 0;       ///< different for each pass
  const void* source = nullptr;  ///< the dataset or loader
  std::string name = {};         ///< name of the source
  StepPlan plan = {};
  /// The options that decide which samples the ranks take, by name, as text. Must be the same on all ranks. None if the
  /// ranks may take samples as they like.
  std::map<std::string, std::string> options = {};
  bool resumable = true;             ///< true if its position can be saved
  bool in_loop = false;              ///< true if begun inside the loop over the epochs
  bool is_replaced = false;          ///< true if a pass over the same source and with equal in_loop has begun since
  bool is_of_earlier_epoch = false;  ///< true if another epoch has begun since
  std::int64_t position = 0;         ///< the end of the current batch's step, in samples
  std::int64_t batches = 0;          ///< number of batches handed out
  std::int64_t taken = 0;            ///< number of the current batch, in the order of all batches of all passes
  BatchWeightPtr batch = {};         ///< the current batch; null before the first
};

/// Where the training function is in a loop over the epochs: over Session::epochs(), or of an operator's train().
enum class EpochLoop {
  none,       ///< it has begun no loop
  in_loop,    ///< inside a loop
  between,    ///< between two calls of an operator's train()
  after,      ///< a loop over Session::epochs() has ended
  none_left,  ///< its first loop had no epochs left, as in a run that is resumed after the loop
};

/// Whether epochs are counted, and who counts them. Not a part of EpochLoop: a program may set the epoch before, in and
/// after a loop.
enum class EpochCount {
  none,           ///< nothing has counted epochs so far
  none_in_state,  ///< nothing has counted epochs so far, nor before the State from which the run was resumed
  by_loop,        ///< a loop over Session::epochs(), or an operator's train(), counts them
  own,            ///< the training function has set the epoch
};

/// The epoch that a run is in.
struct CurrentEpoch {
  std::int64_t number = 0;
  EpochLoop loop = EpochLoop::none;
  EpochCount count = EpochCount::none;
  std::int64_t last_loop_end = -1;  ///< the epoch at which a loop over Session::epochs() has ended
  std::int64_t last_complete = -1;  ///< the last epoch that was saved as complete
  /// The number of passes after which an epoch was saved as complete, although it then had another pass. The largest
  /// such number of all epochs; 0 if this has not happened.
  std::int64_t passes_before_more = 0;
  /// If the run was resumed from a checkpoint that was saved as the end of an epoch: the number of passes that the
  /// epoch had until then; otherwise 0.
  std::int64_t resumed_after = 0;
  std::int64_t call = -1;  ///< number of the operator trainer's call, from 0; -1 without an operator

  bool is_in_loop() const noexcept { return loop == EpochLoop::in_loop; }
  bool has_left_loop() const noexcept { return loop == EpochLoop::between || loop == EpochLoop::after; }
  bool is_after_loop() const noexcept { return loop == EpochLoop::after || loop == EpochLoop::none_left; }
  /// True if the training function is or was inside a loop.
  bool has_looped() const noexcept { return is_in_loop() || has_left_loop(); }
  bool is_counted() const noexcept { return count == EpochCount::by_loop || count == EpochCount::own; }
};

/// Identifies the current batch of an open pass.
struct BatchOfPass {
  std::int64_t pass = 0;   ///< number of the pass
  std::int64_t batch = 0;  ///< number of the batch in the pass, from 1
};

/// Receives events of a step, on the thread that runs the training function.
class StepListener {
 public:
  virtual ~StepListener() = default;
  /// Gradients now belong to the rank's micro-batch of this number; −1: to none, or to a batch without a weight.
  virtual void micro_batch_changed(int micro_batch) = 0;
  /// `pass` has handed out a batch, which is already counted.
  virtual void batch_begun(const OpenPass& pass) = 0;
  /// An epoch begins, in session.epochs() or because the program has set it.
  virtual void epoch_begun() {}
  /// `pass` ends: it is complete, or it was left early.
  virtual void pass_ended(const OpenPass& pass) = 0;
};

/// Used only by the thread that runs the training function.
class Steps {
 public:
  Steps() = default;
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;
  ~Steps();

  // The run's position.
  CurrentEpoch epoch = {};
  std::int64_t global_step = 0;
  std::int64_t samples_since_report = 0;

  std::weak_ptr<StepListener> listener = {};  ///< receives events as long as it lives

  /// The batch to which gradients of a backward() belong: the batch of the innermost scope; without a scope, the batch
  /// that the open passes have handed out last; without such a batch, one with global = 0.
  const BatchWeight& batch() const noexcept { return *batch_; }
  /// The weight that the program has given to batch(), else its relative weight. Throws an Error, the same on all
  /// ranks, if open passes have current batches of possibly different weights and no scope says which one counts.
  double weight() const;

  // The following functions are called by passes over data.
  std::int64_t next_number() noexcept { return ++number_; }
  /// Opens a pass. It replaces an open pass over the same source; the replaced pass is open again once it hands out its
  /// next batch. Returns the current batches of the other open passes with the same value of OpenPass::in_loop.
  std::vector<BatchOfPass> begin_pass(OpenPass pass);
  /// Opens a pass over data that are whole on each rank; its batches have no weight and take no steps.
  void begin_whole_pass(OpenPass pass) { whole_.push_back(std::move(pass)); }
  /// Notes that the pass has handed out `batch`. `samples`: samples of the batch's step, over all ranks.
  void begin_batch(std::int64_t pass, const BatchWeightPtr& batch, std::int64_t samples);
  void end_pass(std::int64_t pass);

  /// Notes that another epoch begins while the pass is open; does nothing if it is not open.
  void mark_of_earlier_epoch(std::int64_t number) noexcept;

  bool is_current(const BatchOfPass& batch) const;
  /// True if a pass other than `pass`, with this value of OpenPass::in_loop, is open or was replaced while it was open.
  bool has_other_open_pass(std::int64_t pass, bool in_loop) const;
  /// Returns an open pass whose position cannot be saved; null if there is none.
  const OpenPass* find_unresumable_pass() const;
  /// Returns an open pass that a checkpoint does not describe, so that a resumed run would not continue it; null if
  /// there is none. That is a pass that another one over the same source has replaced, or one that began in an earlier
  /// epoch. If no pass over split data is open, it is an open pass over data that are not split.
  const OpenPass* find_unsaved_pass() const;
  /// True if no step is half done.
  bool is_step_complete() const noexcept;
  /// True if the workers can stop between two batches now: no step is half done, at most one pass is open, and no pass
  /// has been replaced or comes from an earlier epoch.
  bool is_boundary() const noexcept;

  /// Makes gradients belong to `batch` until leave_scope(). If it is null, all ranks have equal weights. Returns the
  /// number of the scope.
  std::int64_t enter_scope(BatchWeightPtr batch);
  void leave_scope(std::int64_t scope);

 private:
  void choose_batch();

  inline static const BatchWeightPtr none_ = std::make_shared<const BatchWeight>();
  BatchWeightPtr batch_ = none_;
  std::string conflict_;  ///< why it is ambiguous which batch counts; empty if it is not
  std::int64_t number_ = 0, taken_ = 0;
  std::vector<OpenPass> passes_, replaced_, whole_;
  std::vector<std::pair<std::int64_t, BatchWeightPtr>> scopes_;
};

/// Returns a copy of `batch` (null: of no batch) with the weight that the program gives to the loss; an empty batch
/// gets 0. Throws an Error (ExitCode::usage) unless the weight is 0, or from 1e-9 to 1e12.
BatchWeightPtr with_weight(const BatchWeightPtr& batch, double weight);

/// True if no step is half done in the run that this thread trains. For callers that have neither session nor model.
bool is_step_complete() noexcept;

}  // namespace muster::detail::step
