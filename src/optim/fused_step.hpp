// Averages gradients and steps an optimizer in one pass over memory. Each rank averages a part of the gradients and
// updates that part of the parameters, in one copy that all ranks of the node share. There is no all-gather, and the
// optimizer's state exists once per node.
//
// The module's parameters and the optimizer's state are a private view (mmap's MAP_PRIVATE) of the shared copy. The
// view shows what the ranks write to the copy. What a user writes to the view goes to private pages of this rank, as if
// nothing were shared. The next step reads those pages through the view, which takes the changes, which must be the
// same on all ranks, into the shared copy; then it drops the pages.
//
// For saving in the background there may be two shared copies, each with a view. After freeze(), the current copy may
// be read until the next freeze(): the next step reads it, writes the other copy and shows that one to the module. It
// writes the other copy past the caches, so it moves as much memory as a step in place.
#pragma once

#include "comm/shared_memory.hpp"
#include "gradients/exchange.hpp"
#include "node/bucket_reduction.hpp"
#include "optim/dirty_pages.hpp"
#include "optim/frozen.hpp"
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
  /// there is no room for it. `states`: number of state tensors per parameter. `freezes`: makes a second copy too, if
  /// there is room. Collective.
  static std::unique_ptr<FusedStep> make(gradients::FusableGradients& gradients, std::vector<at::Tensor> parameters,
                                         int states, bool freezes);

  ~FusedStep();

  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  /// Number of state tensors for which each parameter has room.
  int states() const noexcept { return states_; }

  /// Determines the optimizer's next step and what was written to parameters and state since the last step. Call it
  /// before this rank gives its gradients to the exchange, since other ranks may write to the shared copy from then on.
  /// Returns a word for FusableGradients::set_word(); if both results are the same on all ranks, so is the word.
  std::uint32_t prepare(torch::optim::Optimizer& optimizer);
  /// Call it before a backward() if the step will average several of them. If parameters were written to since the last
  /// step, their present values become part of the word.
  void note_written();
  /// Call it after a step that was taken. After a step that failed, the notes stay, since a rank that an exception has
  /// kept from the step still has its own.
  void forget_noted() noexcept;
  /// How the averages are checked for NaN and infinite numbers.
  enum class Look {
    no,
    meanwhile,  ///< in the same pass as the step, which may have written bad numbers
    before,     ///< before the step, which writes nothing if there is a bad number
    alone,      ///< without a step: nothing is written
  };
  struct Stepped {
    double scale = 1;      ///< factor of the averages in the step, from max_norm
    double norm = 0;       ///< norm of the averages before scaling; only with max_norm
    bool bad = false;      ///< true if an average is NaN or infinite; the same on all ranks
    bool differs = false;  ///< true if the ranks' words differ or gradients were changed by hand: nothing was written
  };
  /// Takes one step with the gradients that were given to the exchange. With max_norm > 0 they are scaled down to that
  /// norm, and checking them costs nothing more, since the norm shows bad numbers. Collective.
  Stepped step(torch::optim::Optimizer& optimizer, double max_norm, Look look);
  /// The first parameter for which the ranks' words differ.
  struct Difference {
    std::size_t parameter = 0;
    bool written = false;  ///< true if its values or state were written to; false if the options differ
  };
  /// Collective.
  Difference difference() const;
  /// Returns the current memory of parameters and state. It stays unchanged until freeze() is called again; by then
  /// nobody may read it any more. Returns nothing if there is only one copy, or if any rank has written to its view
  /// since the last step. Collective.
  std::optional<FrozenMemory> freeze();
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
  bool may_be_read(const at::Tensor& tensor, const at::Tensor& view) const;
  void find_changes();
  std::uint64_t hash_of_written(std::size_t parameter, std::size_t kind, const void* values) const;
  /// The copy that was written from the frozen one is that of now.
  void change_over(torch::optim::Optimizer& optimizer);
  double survey(bool squares);
  /// A number for each chunk, of whoever worked on it; after the parameters and state.
  std::span<double> marks() const;
  /// Whether an exception has made another rank abandon the pass.
  bool abandoned() const;
  bool differs() const;
  /// Whether that bucket has floats, not doubles.
  bool in_floats(std::size_t bucket) const;
  template <class T>
  bool step_chunk(const node::BucketReduction::Chunk& chunk, std::span<std::byte* const> gradients, double scale,
                  bool look);
  Copy& current() const noexcept { return *copies_[current_]; }
  /// What the next step writes.
  std::size_t next() const noexcept { return frozen_ ? 1 - current_ : current_; }

  gradients::FusableGradients* gradients_;
  std::vector<at::Tensor> parameters_;
  int states_;
  std::vector<std::unique_ptr<Copy>> copies_;  ///< one or two; the first ends with chunk_results()
  std::size_t bytes_;                          ///< of parameters and state
  std::size_t current_ = 0;
  bool frozen_ = false;                    ///< the current one, since the last step
  std::vector<std::vector<Pages>> pages_;  ///< [buckets of the exchange][their parameters, then each kind of state]
  std::vector<Target> targets_;            ///< [parameters]
};

}  // namespace muster::detail::optim
