// The averaging of gradients and the step of an optimizer in one pass over memory: each rank averages a part of the
// gradients and updates that part of the parameters, in one copy that all ranks of the node share. There is no
// all-gather, and the optimizer's state exists once.
//
// The parameters that the module sees, and the state that the optimizer sees, are a private view of that copy (mmap's
// MAP_PRIVATE): it shows what the ranks write there; but what a user writes to them goes to pages of this rank alone,
// as if there were no sharing. The next step reads such pages through the view, and so takes what was changed, on all
// ranks alike, into the shared copy; then it drops them.
//
// For saving without a stop there may be two shared copies, with a view each. freeze() says that the one of now is to
// be read for a while: the next step reads it and writes the other, which then is the one that the module sees. It goes
// past the caches there, so that it moves as much memory as a step in place.
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
  /// Whether these parameters can be updated so.
  static bool fits(const std::vector<at::Tensor>& parameters);

  /// Moves the parameters, those of the exchange in its order, into the shared copy: null where there is no room for
  /// it. `states`: tensors of state per parameter. `freezes`: there is to be a second copy, where there is room for it.
  /// Collective.
  static std::unique_ptr<FusedStep> make(gradients::FusableGradients& gradients, std::vector<at::Tensor> parameters,
                                         int states, bool freezes);

  ~FusedStep();

  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  /// Tensors of state that a parameter has room for.
  int states() const noexcept { return states_; }

  /// Looks at what the optimizer is about to do, and at what was written to parameters and state since the last step.
  /// Before this rank gives its gradients to the exchange: from then on others may write to the shared copy. A word for
  /// them (FusableGradients::set_word): the same if both are the same on all ranks.
  std::uint32_t prepare(torch::optim::Optimizer& optimizer);
  /// Before a backward() after which the step will average more than one: what stands in the parameters now, if it was
  /// written since the last step, is a part of the word.
  void note_written();
  /// The step has been taken. After one that has not, what was noted stays: a rank that an exception had kept from it
  /// still has its notes.
  void forget_noted() noexcept;
  /// Whether the averages are looked at for NaN and infinite numbers.
  enum class Look {
    no,
    meanwhile,  ///< in the same pass, which may then have written them
    before,     ///< nothing is written where there is one
    alone,      ///< nothing is written in any case
  };
  struct Stepped {
    double scale = 1;      ///< of the averages that it stepped with, for max_norm
    double norm = 0;       ///< of the averages before they were scaled down, with max_norm
    bool bad = false;      ///< there was one, the same on all ranks
    bool differs = false;  ///< the ranks' words: nothing was written
  };
  /// One step from the gradients that were given to the exchange. With max_norm > 0 they are scaled down to it, and a
  /// look at them costs nothing, for which the norm serves. Collective.
  Stepped step(torch::optim::Optimizer& optimizer, double max_norm, Look look);
  /// Where the words differ, for the first parameter for which they do. Collective.
  struct Difference {
    std::size_t parameter = 0;
    bool written = false;  ///< its values or its state were written to; else the options differ
  };
  Difference difference() const;
  /// The memory that parameters and state are in now, which stays as it is until freeze() is called again; by then
  /// nobody reads it any more. None where there is one copy, or where any rank has written to its view since the last
  /// step. Collective.
  std::optional<FrozenMemory> freeze();
  /// Gives the optimizer a state of this rank's own, for steps of another kind.
  void release(torch::optim::Optimizer& optimizer) const;

 private:
  struct Pages;
  struct Target;
  /// What the ranks share, and this rank's view of it.
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
  std::vector<std::unique_ptr<Copy>> copies_;  ///< one or two; after the first's parameters and state the parts' norms
  std::size_t bytes_;                          ///< of parameters and state
  std::size_t current_ = 0;
  bool frozen_ = false;                    ///< the current one, since the last step
  std::vector<std::vector<Pages>> pages_;  ///< [buckets of the exchange][their parameters, then each kind of state]
  std::vector<Target> targets_;            ///< [parameters]
};

}  // namespace muster::detail::optim
