// The averaging of gradients and the step of an optimizer in one pass over memory: each rank averages a part of the
// gradients and updates that part of the parameters, in one copy that all ranks of the node share. There is no
// all-gather, and the optimizer's state exists once.
//
// The parameters that the module sees, and the state that the optimizer sees, are a private view of that copy (mmap's
// MAP_PRIVATE): it shows what the ranks write there; but what a user writes to them goes to pages of this rank alone,
// as if there were no sharing. The next step reads such pages through the view, and so takes what was changed, on all
// ranks alike, into the shared copy; then it drops them.
#pragma once

#include "comm/shared_memory.hpp"
#include "gradients/exchange.hpp"
#include "node/bucket_reduction.hpp"
#include "optim/dirty_pages.hpp"
#include "optim/update_rules.hpp"

#include <cstddef>
#include <memory>
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
  /// it. `states`: tensors of state per parameter. Collective.
  static std::unique_ptr<FusedStep> make(gradients::FusableGradients& gradients, std::vector<at::Tensor> parameters,
                                         int states);

  ~FusedStep();

  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  /// Tensors of state that a parameter has room for.
  int states() const noexcept { return states_; }

  /// Looks at what the optimizer is about to do, and at what was written to parameters and state since the last step.
  /// Before this rank gives its gradients to the exchange: from then on others may write to the shared copy.
  void prepare(torch::optim::Optimizer& optimizer);
  /// Whether the averages are looked at for NaN and infinite numbers.
  enum class Look {
    no,
    meanwhile,  ///< in the same pass, which may then have written them
    before,     ///< nothing is written where there is one
    alone,      ///< nothing is written in any case
  };
  struct Stepped {
    double norm = 0;   ///< of the averages before they were scaled down, with max_norm
    bool bad = false;  ///< there was one, the same on all ranks
  };
  /// One step from the gradients that were given to the exchange. With max_norm > 0 they are scaled down to it, and a
  /// look at them costs nothing, for which the norm serves. Collective.
  Stepped step(torch::optim::Optimizer& optimizer, double max_norm, Look look);
  /// Gives the optimizer a state of this rank's own, for steps of another kind.
  void release(torch::optim::Optimizer& optimizer) const;

 private:
  struct Pages;
  struct Target;

  FusedStep(gradients::FusableGradients& gradients, std::vector<at::Tensor> parameters, int states,
            comm::SharedRegion region, std::vector<std::vector<Pages>> pages, std::size_t bytes);
  std::vector<Pages>& pages_of(std::size_t parameter);
  void show();
  void find_changes();
  double survey(bool squares);
  /// A number for each chunk, of whoever worked on it; after the parameters and state.
  std::span<double> marks() const;
  /// Whether an exception has made another rank abandon the pass.
  bool abandoned() const;
  /// Whether that bucket has floats, not doubles.
  bool in_floats(std::size_t bucket) const;
  template <class T>
  bool step_chunk(const node::BucketReduction::Chunk& chunk, std::span<std::byte* const> gradients, double scale,
                  bool look);

  gradients::FusableGradients* gradients_;
  std::vector<at::Tensor> parameters_;
  int states_;
  comm::SharedRegion region_;
  std::size_t bytes_;  ///< of parameters and state; the parts' norms follow
  std::shared_ptr<std::byte> view_;
  DirtyPages dirty_;
  std::vector<std::vector<Pages>> pages_;  ///< [buckets of the exchange][their parameters, then each kind of state]
  std::vector<Target> targets_;            ///< [parameters]
};

}  // namespace muster::detail::optim
