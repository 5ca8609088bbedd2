// The steps of a run: which batch counts now, which training passes are open, and how many steps there have been. Data
// tells of passes and batches; the reducer reads how much the batch that counts weighs, the session the numbers.
#pragma once

#include "step/batch_weight.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::step {

using BatchWeightPtr = std::shared_ptr<const BatchWeight>;

/// How a pass is cut into steps: two of the same plan that stand at the same place weigh alike.
struct Plan {
  std::int64_t samples = 0;       ///< of the dataset; 0 for a stream
  std::int64_t global_batch = 0;  ///< samples of a step; 0 where a sampler of the user's own chooses them
  bool drop_last = false;
  bool is_stream() const noexcept { return samples == 0 && global_batch > 0; }
  bool operator==(const Plan&) const = default;
};

/// A training pass that has begun and is not over.
struct OpenPass {
  std::int64_t number = 0;       ///< different for each pass
  const void* source = nullptr;  ///< the dataset or loader
  std::string name = {};         ///< of the source
  Plan plan = {};
  bool resumable = true;         ///< its position can be saved
  bool in_loop = false;          ///< begun inside the loop over the epochs
  bool replaced = false;         ///< another pass of its kind over the same source has begun since
  bool of_epoch_before = false;  ///< another epoch has begun since
  std::int64_t position = 0;     ///< where the step ends of which the batch in hand is, in samples
  std::int64_t batches = 0;      ///< handed out
  std::int64_t taken = 0;        ///< orders the batches in hand
  BatchWeightPtr batch = {};     ///< in hand, if there is one
};

/// The batch that an open pass has in hand, by how many it has handed out.
struct BatchOfPass {
  std::int64_t pass = 0, batch = 0;
};

/// The moments of a step at which more than counting has to happen, on the thread that runs the training function.
class Moments {
 public:
  virtual ~Moments() = default;
  /// From now on it is that micro-batch of the rank's that counts; −1: none does, or no batch that is weighed.
  virtual void micro_batch_changed(int micro_batch) = 0;
  /// `pass` has handed out a batch, and it is counted.
  virtual void batch_begun(const OpenPass& pass) = 0;
  /// A batch is done with and the next one is asked for; no step is half done, and no other pass is open. May throw.
  virtual void between_batches() = 0;
};

/// Belongs to the thread that runs the training function.
class Steps {
 public:
  Steps() = default;
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;
  ~Steps();

  // Where the run stands.
  std::int64_t epoch = 0;
  bool epoch_set = false;            ///< by the training function
  bool counted = false;              ///< so are the epochs: it sets them, or loops over Session::epochs()
  bool in_loop = false;              ///< inside a loop over Session::epochs(), or inside an operator's train()
  bool looped = false;               ///< such a loop has begun
  bool uncounted_before = false;     ///< the run goes on from a State that was saved before epochs were counted
  std::int64_t complete_epoch = -1;  ///< the last one that was saved as over
  std::int64_t last_over = -1;       ///< the epoch at which a loop over session.epochs() has come to its end
  bool after_loop = false;           ///< such a loop has come to its end, or had no epoch left
  std::int64_t call = -1;            ///< number of the operator trainer's call, from 0; -1 without an operator
  std::int64_t global_step = 0;
  std::int64_t samples_since_report = 0;

  std::weak_ptr<Moments> moments = {};  ///< called as long as it lives

  /// What counts in a backward(): the innermost scope's batch, else the one in hand taken last, else one of global = 0.
  const BatchWeight& batch() const noexcept { return *batch_; }
  /// How much that weighs. An Error, alike on all ranks, if several are in hand that need not weigh the same.
  double weight() const;

  // For the passes.
  std::int64_t next_number() noexcept { return ++number_; }
  /// In place of one of the same source, which is open again with its next batch. Gives what the others of its kind, in
  /// the loop over the epochs or outside, have in hand.
  std::vector<BatchOfPass> begin_pass(OpenPass pass);
  /// A pass over data that are whole on each rank; it weighs nothing and takes no steps.
  void begin_whole_pass(OpenPass pass) { whole_.push_back(std::move(pass)); }
  /// That pass has handed out `batch`; `samples` of its step count over all ranks.
  void begin_batch(std::int64_t pass, const BatchWeightPtr& batch, std::int64_t samples);
  /// A batch is done with, and the next one is asked for.
  void end_batch();
  void end_pass(std::int64_t pass);

  /// Another epoch begins while that pass is open, if it is.
  void outlive_epoch(std::int64_t number) noexcept;

  bool is_in_hand(const BatchOfPass& batch) const;
  /// Whether another pass of that kind is open.
  bool others_open(std::int64_t pass, bool in_loop) const;
  /// An open pass whose position cannot be saved; null if there is none.
  const OpenPass* without_position() const;
  /// An open pass that a saved position leaves out: one in whose place another over the same source has begun, one that
  /// began in an earlier epoch, or one over data that are whole on each rank while no other is open; null if there is
  /// none.
  const OpenPass* left_out() const;
  /// Whether no step is half done.
  bool complete() const noexcept;

  /// Until leave_scope(), `batch` counts; null where all ranks count the same.
  std::int64_t enter_scope(BatchWeightPtr batch);
  void leave_scope(std::int64_t scope);

 private:
  void choose_batch();

  inline static const BatchWeightPtr none_ = std::make_shared<const BatchWeight>();
  BatchWeightPtr batch_ = none_;
  std::string conflict_;  ///< why it cannot be said which batch counts
  std::int64_t number_ = 0, taken_ = 0;
  std::vector<OpenPass> passes_, replaced_, whole_;
  std::vector<std::pair<std::int64_t, BatchWeightPtr>> scopes_;
};

/// Whether a step is half done in the run that this thread trains, for who knows neither its session nor its models.
bool amid_step() noexcept;

}  // namespace muster::detail::step
