// Averages gradients and steps an optimizer in one pass over memory. Each rank averages a part of the gradients and
// updates that part of the parameters, in one copy that all ranks of the node share. There is no all-gather, and the
// optimizer's state exists once per node.
//
// The module's parameters and the optimizer's state are a private view (mmap's MAP_PRIVATE) of the shared copy. The
// view shows what the ranks write to the copy. What a user writes to the view goes to private pages of this rank, as if
// nothing were shared. The next step reads those pages through the view, which takes the changes, which must be the
// same on all ranks, into the shared copy; then it drops the pages.
//
// For saving in the background there may be two shared copies, each with a view. After take_snapshot(), the current
// copy may be read until the next take_snapshot(): the next step reads it, writes the other copy and shows that one to
// the module. It writes the other copy past the caches, so it moves as much memory as a step in place.
#pragma once

#include "comm/shared_memory.hpp"
#include "gradients/exchange.hpp"
#include "node/bucket_reduction.hpp"
#include "optim/dirty_pages.hpp"
#include "optim/memory_snapshot.hpp"
#include "optim/update_rules.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace muster::detail::optim {

class FusedStep {
 public:
  /// True if these parameters can be stepped in this way.
  static bool fits(const std::vector<at::Tensor>& parameters);

  /// Moves the parameters, which must be those of the exchange in its order, into the shared copy. Returns null if
  /// there is no room for it. `states`: number of state tensors per parameter. `with_second_copy`: makes a second copy
  /// too, if there is room. Collective.
  static std::unique_ptr<FusedStep> make(gradients::FusableGradients& gradients, std::vector<at::Tensor> parameters,
                                         int states, bool with_second_copy);

  ~FusedStep();

  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  /// Number of state tensors for which each parameter has room.
  int max_state_tensors() const noexcept { return states_; }

  /// Determines the optimizer's next step and what was written to parameters and state since the last step. Call it
  /// before this rank gives its gradients to the exchange, since other ranks may write to the shared copy from then on.
  /// Returns a word for FusableGradients::set_check_word(); if both results are the same on all ranks, so is the word.
  std::uint32_t prepare(torch::optim::Optimizer& optimizer);
  /// Call it before a backward() if the step will average several of them. If parameters were written to since the last
  /// step, their present values become part of the word.
  void note_written();
  /// Call it after a step that was taken. After a step that failed, the notes stay, since a rank that an exception has
  /// kept from the step still has its own.
  void clear_notes() noexcept;
  /// How the averages are checked for NaN and infinite numbers.
  enum class NumberCheck {
    none,
    during_step,   ///< in the same pass as the step, which may have written bad numbers
    before_step,   ///< before the step, which writes nothing if there is a bad number
    without_step,  ///< without a step: nothing is written
  };
  struct StepResult {
    double scale = 1;             ///< factor of the averages in the step, from max_norm
    double norm = 0;              ///< norm of the averages before scaling; only with max_norm
    bool has_bad_number = false;  ///< true if an average is NaN or infinite; the same on all ranks
    bool ranks_differ =
        false;  ///< true if the ranks' words differ or gradients were changed by hand: nothing was written
  };
  /// Takes one step with the gradients that were given to the exchange. With max_norm > 0 they are scaled down to that
  /// norm, and checking them costs nothing more, since the norm shows bad numbers. Collective.
  StepResult step(torch::optim::Optimizer& optimizer, double max_norm, NumberCheck check);
  /// The first parameter for which the ranks' words differ.
  struct Difference {
    std::size_t parameter = 0;
    bool written = false;  ///< true if its values or state were written to; false if the options differ
  };
  /// Collective.
  Difference difference() const;
  /// Returns the current memory of parameters and state. It stays unchanged until take_snapshot() is called again; by
  /// then nobody may read it any more. Returns nothing if there is only one copy, or if any rank has written to its
  /// view since the last step. Collective.
  std::optional<MemorySnapshot> take_snapshot();
  /// Gives the optimizer a private copy of its state, for steps that are not fused.
  void release(torch::optim::Optimizer& optimizer) const;

 private:
  struct Pages;
  struct Target;
  /// A copy that the ranks share, and this rank's view of it.
  struct Copy {
    Copy(comm::SharedRegion region, std::size_t bytes);
    comm::SharedRegion region;
    std::shared_ptr<std::byte> view;
    DirtyPages dirty;
  };

  FusedStep(gradients::FusableGradients& gradients, std::vector<at::Tensor> parameters, int states,
            std::vector<std::unique_ptr<Copy>> copies, std::vector<std::vector<Pages>> pages, std::size_t bytes);
  std::vector<Pages>& pages_of(std::size_t parameter);
  void drop_changed();
  void show();
  bool can_be_read_in_place(const at::Tensor& tensor, const at::Tensor& view) const;
  void find_changes();
  std::uint64_t hash_of_written(std::size_t parameter, std::size_t kind, const void* values) const;
  /// Makes the other copy the current one, after a step has written it.
  void switch_copies(torch::optim::Optimizer& optimizer);
  double check_averages(bool squares);
  /// [chunks], numbers shared by the ranks, after the parameters and state. The rank that processes a chunk writes its.
  std::span<double> chunk_results() const;
  /// True if an exception has made another rank abandon the averaging.
  bool abandoned() const;
  bool differs() const;
  /// True if the bucket holds floats, false if doubles.
  bool is_float(std::size_t bucket) const;
  template <class T>
  bool step_chunk(const node::BucketReduction::Chunk& chunk, std::span<std::byte* const> gradients, double scale,
                  bool check);
  Copy& current() const noexcept { return *copies_[current_]; }
  /// Index of the copy that the next step writes.
  std::size_t next() const noexcept { return snapshot_held_ ? 1 - current_ : current_; }

  gradients::FusableGradients* gradients_;
  std::vector<at::Tensor> parameters_;
  int states_;
  std::vector<std::unique_ptr<Copy>> copies_;  ///< one or two; the first ends with chunk_results()
  std::size_t bytes_;                          ///< of parameters and state
  std::size_t current_ = 0;                    ///< index of the copy that the module sees
  bool snapshot_held_ =
      false;  ///< true if take_snapshot() was called since the last step: the step must not write this copy
  std::vector<std::vector<Pages>> pages_;  ///< [buckets of the exchange][their parameters, then each kind of state]
  std::vector<Target> targets_;            ///< [parameters]
};

}  // namespace muster::detail::optim
