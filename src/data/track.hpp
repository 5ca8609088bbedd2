// Where a session stands in one dataset or data loader.
#pragma once

#include "data/samples.hpp"
#include "muster/dataset.hpp"
#include "muster/json.hpp"
#include "step/steps.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::data {

class Passes;

/// What one pass takes, fixed when it begins.
struct Pass {
  Order order;
  std::int64_t position = 0;  ///< where it begins, not 0 after a resume
  step::Plan plan = {};
  step::Share share = {};
  bool training = false;    ///< counted: it has a position, and its batches weigh gradients
  std::int64_t number = 0;  ///< which pass of the session it is; 0 until it has begun

  std::int64_t num_steps() const noexcept {
    return data::num_steps(position, order.size(), plan.global_batch, plan.drop_last);
  }
};

/// One per dataset or loader and session, shared by all that iterate over it; belongs to the thread that runs the
/// training function.
///
/// An epoch is a sequence of passes; what follows is of the training ones. The last one begun is under way until it
/// gives no more batches or its range dies, or until the next one begins. The position is the number of passes that the
/// epoch had, and the samples that the one under way has taken. Restored, the program runs its epoch again from the
/// start: the passes that were finished come back empty, and the next one goes on after those samples. A pass inside
/// another's batch (validation, every so many steps) is not run again by a program that goes on after that batch, so
/// it does not come back.
struct Track {
  std::string name;
  step::Share share = {};
  bool split = true;  ///< else every rank sees all of it, and it has no position
  std::uint64_t seed = 0;
  bool loader = false;                        ///< a data loader's, not a dataset's
  bool resumable = true;                      ///< false where a sampler of the user's own deals
  std::weak_ptr<Passes> owner = {};           ///< set by Passes::add
  std::shared_ptr<step::Steps> steps = {};    ///< likewise
  std::weak_ptr<const void> trained_by = {};  ///< the loader that had the last training pass

  /// Makes `value` the epoch; forgets the position in another one.
  void begin_epoch(std::int64_t value);
  /// The training function does that: the session is in that epoch then, and all of which it has set none.
  void set_epoch(std::int64_t value);
  /// Whether a pass is under way, or was when the position was saved that has been restored.
  bool unfinished() const noexcept;
  /// Whether all its passes were taken aside of training.
  bool only_watched() const noexcept { return watched && ticket == 0 && passes == 0 && consumed == 0; }
  /// The position as JSON, for a checkpoint; the batch in hand counts as taken. Null if the dataset is not split.
  Json position() const;
  /// The next passes go on there, at any number of workers and in the order of the seed that the run began with.
  void restore(const Json& position);
  /// Of a position in an epoch that is over: only how large its steps were, to say if that has changed.
  void remember(const Json& position);

  /// The pass that would begin now, over `count` samples.
  Pass plan(const BatchOptions& options, std::int64_t count) const;
  Pass begin_pass(const BatchOptions& options, std::int64_t count);
  /// A batch of the pass is in hand; `samples` of its step count over all ranks.
  void take(const Pass& pass, const step::BatchWeightPtr& batch, std::int64_t samples);
  /// The batch of the pass that is in hand is done with, and the next one is asked for.
  void leave(const Pass& pass);
  void end_pass(const Pass& pass);

  std::int64_t epoch = 0;
  bool epoch_set = false;         ///< by the training function
  std::int64_t passes = 0;        ///< that were, in this epoch
  std::int64_t finished = 0;      ///< of those, the ones that a program which goes on begins again
  std::int64_t replays = 0;       ///< of those, the ones that have yet to come back empty
  std::int64_t asides = 0;        ///< passes aside of training, in this epoch
  bool watched = false;           ///< there was one at all
  std::int64_t ticket = 0;        ///< number of the training pass begun last
  bool under_way = false;         ///< that pass
  std::int64_t consumed = 0;      ///< samples that it has taken, or that a restored one had
  std::int64_t window = 0;        ///< of its local shuffle: depends on the number of workers when it began
  std::int64_t global_batch = 0;  ///< of its steps
  int workers = 0;                ///< among which they were divided; 0: not known
  std::int64_t samples = 0;       ///< of the dataset, as it began

  // Of the pass under way, for finish().
  std::vector<step::Steps::Place> inside = {};  ///< the passes in hand when it began, with their batches till then
  bool late = false;                            ///< one of them had gone on from its first batch
  bool outside = false;    ///< or it is known to be inside no batch of another's: it was not when it was saved
  bool straddled = false;  ///< the last pass counted in `finished` ended while another was in hand
  bool restored = false;   ///< and no pass has begun since

  void finish();
  /// Whether the pass under way is all inside one batch of another's.
  bool contained() const;
  std::int64_t to_replay() const noexcept;
  void say_if_steps_changed(const Pass& pass, const BatchOptions& options);
};

}  // namespace muster::detail::data
