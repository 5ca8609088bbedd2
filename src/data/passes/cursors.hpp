// Where a session stands in its datasets and data loaders.
#pragma once

#include "data/passes/samples.hpp"
#include "muster/dataset.hpp"
#include "muster/json.hpp"
#include "step/steps.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::data {

class Cursors;

/// What one pass takes, fixed when it begins.
struct Pass {
  Order order;
  std::int64_t position = 0;  ///< where it begins, not 0 after a resume
  step::Plan plan = {};
  step::Share share = {};
  bool training = false;  ///< counted: it has a position, and its batches weigh gradients
  bool was = false;       ///< it was finished before the run was stopped, and comes back empty
  bool in_loop = false;   ///< it began inside the loop over the epochs
  bool whole = false;     ///< it is open for the steps although every rank sees all of the data
  std::int64_t epoch = 0;
  std::int64_t number = 0;  ///< which pass of the session it is; 0 until it has begun

  std::int64_t num_steps() const noexcept {
    return data::num_steps(position, order.size(), plan.global_batch, plan.drop_last);
  }
};

/// What a cursor stands in.
struct CursorOptions {
  std::string name;
  step::Share share = {};
  int full = 0;  ///< as many times batch_size are in a step, though workers may be missing; 0: one for each there is
  bool split = true;  ///< else every rank sees all of it, and it has no position
  std::uint64_t seed = 0;
  bool loader = false;    ///< a data loader, not a dataset
  bool resumable = true;  ///< false for a stream, and where a sampler of the user's own chooses the samples
  bool stream = false;    ///< of which nobody knows how many samples it has

  int batches_in_step() const noexcept { return full > 0 ? full : share.total; }
  /// Whether gradients are weighted by the samples of its batches.
  bool weighs() const noexcept { return resumable || stream; }
};

/// One per dataset or loader and session, shared by all that iterate over it; belongs to the thread that runs the
/// training function. Used once Cursors::add has it.
///
/// An epoch is a sequence of passes; what follows is of the training ones. The last one begun is under way until it is
/// at its end, its range dies, or the next one begins. The position: the passes that the epoch had, and the samples
/// that the one under way has taken. Restored, the program runs its epoch again from the start: passes that were
/// finished come back empty, and the next one goes on after those samples. A pass inside another's batch (validation,
/// every so many steps) does not come back: a program that goes on after that batch does not run it again.
///
/// Passes inside the loop over session.epochs() (of an operator: inside train()) and passes outside of it are counted
/// apart, since a run that goes on makes those outside again, or leaves out what only a fresh start does.
class Cursor {
 public:
  explicit Cursor(CursorOptions options) : options_(std::move(options)) {}

  const CursorOptions& options() const noexcept { return options_; }

  /// Makes `epoch` the epoch; a position in another one is forgotten.
  void begin_epoch(std::int64_t epoch);
  /// The training function does that: the session is in it then, and every cursor of which it has set none.
  void set_epoch(std::int64_t epoch);
  /// A loader that does not train has set its own: the epoch where no other trains under the same name.
  void set_epoch_aside(std::int64_t epoch);
  /// The training function enters the loop over the epochs.
  void enter_loop();
  /// Whether a pass is under way, or was when the position was saved that has been restored.
  bool unfinished() const noexcept;
  /// The position as JSON, for a checkpoint; the batch in hand counts as taken. Null if the dataset is not split.
  Json position() const;
  /// The next passes go on there, at any number of workers and in the order of the seed that the run began with.
  /// `complete`: its epoch is over, and what counts is only how large its steps were, to say if that has changed.
  void restore(const Json& position, bool complete = false);

  /// The pass that would begin now, over `count` samples.
  Pass plan(const BatchOptions& options, std::int64_t count) const;
  /// `loader`: the one that begins it, if it is one; an Error if a training pass over another is under way.
  Pass begin_pass(const BatchOptions& options, std::int64_t count, const std::shared_ptr<const void>& loader = {});
  /// A batch of the pass is in hand; `samples` of its step count over all ranks.
  void begin_batch(const Pass& pass, const step::BatchWeightPtr& batch, std::int64_t samples);
  /// That batch is done with, and the next one is asked for.
  void end_batch(const Pass& pass);
  void end_pass(const Pass& pass);

 private:
  friend class Cursors;

  /// The epoch, and its passes.
  struct Epoch {
    std::int64_t number = 0;
    std::int64_t passes = 0;    ///< training passes that were
    std::int64_t finished = 0;  ///< of those, the ones that a program which goes on begins again
    std::int64_t made = 0;      ///< of those, the ones that this process has made itself
    std::int64_t to_skip = 0;   ///< of those, the ones that have yet to come back empty
    bool straddled = false;     ///< the last pass counted in `finished` ended while another was open
  };
  /// A part of an epoch in which passes that do not train are numbered from 0. Their random numbers and their order
  /// depend on the section and the number. A run that goes on repeats the passes before the training pass that was
  /// under way, and within it only those at the steps that are left: a section per step gives both the same numbers.
  struct Section {
    std::int64_t epoch = -1;
    std::int64_t finished = 0;  ///< training passes of the epoch, over all datasets
    std::int64_t step = 0;      ///< within the training passes under way, from 1; 0 if none is. Outside of an
                                ///< operator's train(): the number of the trainer's call, from 1
    bool after_loop = false;    ///< the loop over session.epochs() is over
    bool operator==(const Section&) const = default;
    /// The same for each section and number, and hardly ever for two of them.
    std::int64_t number_of(std::int64_t evaluation) const noexcept;
  };
  /// The training pass begun last, here or before the restart.
  struct LastPass {
    std::int64_t number = 0;  ///< 0: none was begun here
    bool under_way = false;
    std::int64_t consumed = 0;         ///< samples that it has taken, or that a restored one had
    std::int64_t steps_before = 0;     ///< steps of the run between its begin and the restart
    std::int64_t first_step = 0;       ///< of the run, when it began
    std::int64_t window = 0;           ///< of its local shuffle: depends on the number of workers when it began
    std::optional<bool> shuffle = {};  ///< none: not known
    std::optional<std::uint64_t> window_seed = {};  ///< of its local shuffle; none: not known
    std::int64_t global_batch = 0;                  ///< of its steps
    int workers = 0;                                ///< as many times batch_size are in them; 0: not known
    std::int64_t samples = 0;                       ///< of the dataset, as it began
    // Where it stands among the others.
    std::vector<step::BatchOfPass> others = {};  ///< the batches in hand when it began
    bool late = false;                           ///< one of them was not the first of its pass
    bool outside = false;  ///< it is known to be inside no batch of another's: it was not when it was saved
  };
  /// The passes inside the loop over the epochs, or those outside of it.
  struct Passes {
    Epoch epoch = {};
    LastPass last = {};
    bool restored = false;  ///< and none has begun since
    bool awaited = false;   ///< the middle of a pass has been restored, and has not been taken up
    bool skipped = false;   ///< since then one has come back empty

    // Passes that do not train.
    Section section = {};          ///< of the last one
    std::int64_t evaluations = 0;  ///< in that section

    /// Whether samples are left of the pass under way.
    bool has_rest() const noexcept { return last.under_way && last.consumed < last.samples; }
    bool unfinished() const noexcept { return last.under_way || last.consumed > 0; }
    bool none() const noexcept { return last.number == 0 && epoch.passes == 0 && last.consumed == 0; }
    std::int64_t to_run_again() const noexcept;
    std::int64_t number_of_evaluation(const Section& now) const noexcept;
    void count_evaluation(const Section& now) noexcept;
    void begin_epoch(std::int64_t number);
    Json position(std::int64_t global_step) const;
    void restore(const Json& position);
  };

  Passes& passes(bool in_loop) noexcept { return in_loop ? in_loop_ : outside_; }
  const Passes& passes(bool in_loop) const noexcept { return in_loop ? in_loop_ : outside_; }
  /// Whether all its passes were evaluations.
  bool only_evaluated() const noexcept { return evaluated_ && in_loop_.none() && outside_.none(); }
  /// No pass has begun since a position was restored.
  bool waits() const noexcept { return in_loop_.restored || outside_.restored; }
  bool under_way() const noexcept { return in_loop_.last.under_way || outside_.last.under_way; }
  /// The section of a pass that does not train and begins now.
  Section section() const;
  void finish(Passes& of);
  std::string named() const;  ///< the beginning of a message about it
  void say_if_steps_changed(Passes& of, const Pass& pass, const BatchOptions& options);
  void say_if_order_changed(const LastPass& last, const BatchOptions& options) const;

  CursorOptions options_;
  std::weak_ptr<Cursors> owner_;
  std::shared_ptr<step::Steps> steps_;
  std::weak_ptr<const void> trained_by_;  ///< the loader that began the last training pass
  Passes in_loop_, outside_;
  bool epoch_set_ = false;  ///< by the training function
  bool evaluated_ = false;  ///< there was a pass that does not train, in any epoch
  bool any_kind_ = false;   ///< the position restored does not say whether its passes were inside the loop
};

/// The cursors of a session, by the names of its data. Belongs to the thread that runs the training function.
class Cursors : public std::enable_shared_from_this<Cursors> {
 public:
  explicit Cursors(std::shared_ptr<step::Steps> of = std::make_shared<step::Steps>()) : steps(std::move(of)) {}

  const std::shared_ptr<step::Steps> steps;  ///< counts what the passes hand out

  /// An Error if a dataset and a loader have the same name.
  void add(const std::shared_ptr<Cursor>& cursor);
  /// Null if no loader has that name.
  std::shared_ptr<Cursor> find_loader(const std::string& name) const;
  /// The training function enters the loop over the epochs, and leaves it.
  void enter_loop();
  void leave_loop() noexcept { steps->in_loop = false; }
  /// The training function is at the beginning of that epoch.
  void begin_epoch(std::int64_t epoch);
  /// What a run that goes on is in.
  void resume_epoch(std::int64_t epoch);
  /// The training function has set the epoch of one of them.
  void set_epoch(std::int64_t epoch);
  /// Positions by name, of this epoch, as JSON; and back, before or after a name is added.
  Json positions() const;
  void restore(const std::string& name, const Json& position, bool complete);
  enum class Passes { unknown, none, under_way, over };
  /// How far the training passes of this epoch are; unknown where no dataset is split.
  Passes of_epoch() const;
  /// The name of a dataset of which a training pass is under way that has samples left; empty if there is none.
  std::string with_rest() const;
  /// The name of a dataset that was saved in the middle of a pass of that kind and has not reached that pass again,
  /// though it has given the empty passes before it; empty if there is none.
  std::string not_taken_up(bool in_loop) const;
  /// The name of a dataset that had passes in this epoch when the run was saved and that the program has not asked for
  /// since; empty if there is none.
  std::string not_taken() const;
  /// The section of a pass that does not train and begins now, inside the loop over the epochs or outside.
  Cursor::Section section(std::int64_t epoch, bool in_loop) const;

 private:
  struct Saved {
    Json position;
    bool complete;
  };
  void enter_epoch(std::int64_t epoch);

  std::map<std::string, std::shared_ptr<Cursor>> cursors_;
  std::map<std::string, Saved> early_;  ///< positions whose dataset or loader has not come yet
  std::map<std::string, Saved> taken_;  ///< positions whose dataset or loader has come
};

}  // namespace muster::detail::data
