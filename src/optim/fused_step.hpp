// Averages gradients and steps an optimizer in one go over memory. Each rank averages a part of the gradients and
// updates the same part of the parameters, in one copy that all ranks of the node share. There is no all-gather, and
// the optimizer's state exists once per node (twice with a second copy, see below).
//
// The module's parameters and the optimizer's state lie in a private view (mmap's MAP_PRIVATE) of the shared copy. A
// rank sees in its view what the ranks write to the copy. If the program writes to the view, the kernel gives this rank
// private pages. The next step reads the private pages, writes the results to the shared copy and drops the pages; so
// all ranks must have written the same values.
//
// Over several nodes, each node has such a copy. A node updates its share of the parameters, which is then gathered
// into the copies of all nodes. It keeps the same share of the state (scattered_state.hpp).
//
// For saving in the background there may be two shared copies on one node, each with a view. After take_snapshot(), the
// current copy may be read until the next take_snapshot(): the next step reads it, writes the other copy and makes the
// module use the other one. It writes past the caches, so it moves as much memory as a step in place.
#pragma once

#include "gradients/exchange.hpp"
#include "node/bucket_reduction.hpp"
#include "node/shared_segment.hpp"
#include "optim/dirty_pages.hpp"
#include "optim/memory_snapshot.hpp"
#include "optim/scattered_state.hpp"
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
  /// True if the types and layouts of these parameters allow a fused step.
  static bool fits(const std::vector<at::Tensor>& parameters);

  /// Moves the parameters into the shared copy; they must be the exchange's parameters, in its order. Returns null if
  /// there is no memory for the copy or, over several nodes, if the kernel does not tell which pages were written.
  /// `states`: number of state tensors per parameter. `with_second_copy`: on one node, makes a second copy as well, if
  /// there is memory. Collective.
  static std::unique_ptr<FusedStep> make(gradients::SharedExchange& gradients, std::vector<at::Tensor> parameters,
                                         int states, bool with_second_copy);

  ~FusedStep();

  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  /// Number of state tensors for which each parameter has room.
  int max_state_tensors() const noexcept { return states_; }

  /// Determines the optimizer's next step and finds what the program has written to parameters and state since the last
  /// step. Call it before this rank gives its gradients to the exchange: from then on, other ranks may write to the
  /// shared copy. Returns a word for SharedExchange::set_check_word(), a hash of both; equal on all ranks if both
  /// are. Throws an Error if an exception has ended the last step.
  std::uint32_t prepare(torch::optim::Optimizer& optimizer);
  /// Call it before each backward() after the first if a step averages several. If the program has written to
  /// parameters since the last step, their present values become part of the next word.
  void note_written();
  /// Forgets what note_written() has recorded. Call it after a step that was taken, not after a step that failed: a
  /// rank that an exception kept from that step still has its records, and all ranks must have the same.
  void clear_notes() noexcept;
  /// How a step checks the averages for NaN and infinite numbers.
  enum class NumberCheck {
    none,
    during_step,   ///< together with the step, which may then have written bad numbers
    before_step,   ///< before the step, which is not taken if there is a bad number
    without_step,  ///< checked, but no step is taken: nothing is written
  };
  struct StepResult {
    double scale = 1;  ///< factor that max_norm has put on the averages of this step
    double norm = 0;   ///< norm of the averages before that factor; only with max_norm
    /// True if the check has found an average that is NaN or infinite; always false with NumberCheck::none. The same
    /// on all ranks.
    bool has_bad_number = false;
    bool ranks_differ =
        false;  ///< true if the ranks' words differ or gradients were changed by hand: nothing was written
  };
  /// Takes one step with the gradients that were given to the exchange. If max_norm > 0, scales the averages down to
  /// that norm; the norm also shows bad numbers, so checking then costs nothing more. Collective.
  StepResult step(torch::optim::Optimizer& optimizer, double max_norm, NumberCheck check);
  /// The first parameter for which the ranks would take different steps.
  struct Difference {
    std::size_t parameter = 0;
    bool written = false;  ///< true if its values or state were written to; false if the options differ
  };
  /// Finds it after a step with `ranks_differ`. Collective.
  Difference difference() const;
  /// Returns the current memory of parameters and state. It stays unchanged until take_snapshot() is called again;
  /// nobody may read it after that. Returns nothing if there is only one copy, or if any rank has written to its view
  /// since the last step. Collective.
  std::optional<MemorySnapshot> take_snapshot();
  /// Over several nodes: makes the optimizer's whole state readable on this rank, until the next step. Collective.
  void gather_state();
  /// True if other nodes have a part of the optimizer's state; the same on all ranks.
  bool has_spread_state() const noexcept { return scattered_ && scattered_->is_spread(); }
  /// Gives the optimizer a copy of its state in memory of this process, for steps that are not fused. Collective.
  void release(torch::optim::Optimizer& optimizer);

 private:
  struct Pages;
  struct Target;
  /// A copy that the ranks of the node share, and this rank's private view of it.
  struct Copy {
    Copy(std::shared_ptr<node::SharedSegment> segment, std::size_t bytes);
    std::shared_ptr<node::SharedSegment> segment;
    std::shared_ptr<std::byte> view;
    DirtyPages dirty;
  };

  FusedStep(gradients::SharedExchange& gradients, std::vector<at::Tensor> parameters, int states,
            std::vector<std::unique_ptr<Copy>> copies, std::vector<std::vector<Pages>> pages, std::size_t bytes,
            std::unique_ptr<ScatteredState> scattered);
  static void reserve(node::SharedSegment& segment, const Topology& topology,
                      const std::vector<std::vector<Pages>>& pages, std::size_t bytes, std::size_t total);
  static std::vector<ScatteredState::Chunk> own_state(const gradients::SharedExchange& gradients,
                                                      const std::vector<at::Tensor>& parameters,
                                                      const std::vector<std::vector<Pages>>& pages);
  std::vector<Pages>& pages_of(std::size_t parameter);
  void drop_changed();
  void show();
  bool can_be_read_in_place(const at::Tensor& tensor, const at::Tensor& view) const;
  void find_changes();
  std::uint64_t hash_of_written(std::size_t parameter, std::size_t kind, const void* values) const;
  /// Makes the other copy the current copy, after a step has written it.
  void switch_copies(torch::optim::Optimizer& optimizer);
  double check_averages(bool squares);
  /// One number per chunk, in shared memory behind the parameters and state. The rank that processes a chunk writes it.
  std::span<double> chunk_results() const;
  /// Returns their sum over all nodes. Collective.
  double sum_of_results() const;
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

  gradients::SharedExchange* gradients_;
  std::vector<at::Tensor> parameters_;
  int states_;
  std::vector<std::unique_ptr<Copy>> copies_;  ///< one or two copies; the first also has chunk_results() at its end
  std::size_t bytes_;                          ///< bytes of parameters and state in each copy
  std::size_t current_ = 0;                    ///< index of the copy that the module uses
  bool snapshot_held_ =
      false;  ///< true if take_snapshot() was called since the last step: the step must not write this copy
  /// [buckets of the exchange][kinds of tensors: the parameters, then each state tensor].
  std::vector<std::vector<Pages>> pages_;
  std::vector<Target> targets_;                ///< [parameters]
  std::unique_ptr<ScatteredState> scattered_;  ///< null on one node
  /// True while a step writes, and after an exception has ended it: parameters may be of two steps.
  bool is_writing_ = false;
};

}  // namespace muster::detail::optim
