// The models that prepare_model() has prepared in a session, in the order of these calls.
#pragma once

#include "base/export.hpp"
#include "gradients/prepared_model.hpp"
#include "muster/communicator.hpp"
#include "muster/state.hpp"
#include "optim/optimizer_step.hpp"
#include "session/weak_tensor.hpp"
#include "state/collect.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::session {

/// Keeps the prepared models, and asks their reducers about averages and accumulated gradients.
class PreparedModels {
 public:
  /// Adds a model. If the State was restored before, sets the model's gradients to the saved gradients.
  void add(std::shared_ptr<gradients::PreparedModel> model);
  const std::vector<std::shared_ptr<gradients::PreparedModel>>& all() const noexcept { return models_; }
  bool empty() const noexcept { return models_.empty(); }
  /// The learning rates of the session's prepared optimizers at their last steps.
  const std::shared_ptr<optim::LastRates>& last_rates() const noexcept { return last_rates_; }
  /// The number of no_sync() scopes that are open.
  const std::shared_ptr<int>& no_sync_depth() const noexcept { return no_sync_depth_; }

  /// How often gradients have been averaged, summed over the models.
  std::int64_t gradient_average_count() const;
  /// Increases with every backward(), whether it averages or only accumulates, and with every average.
  std::int64_t gradient_count() const;
  /// Sets the running statistics of batch-norms to their mean over the workers; other buffers stay as they are on each
  /// worker. With virtual workers, every other buffer is set to that of the step's first micro-batch. Collective.
  MUSTER_INTERNAL_API void synchronise_statistics() const;
  /// With virtual workers: puts the buffers of this rank's micro-batch `micro_batch`, from 0, into the models.
  void load_buffers_of(int micro_batch) const;
  /// Calls `visit` with the name of each parameter of each model, its values, and its .grad, which is undefined if
  /// there is none. Averages the .grad before, unless gradients accumulate with weights. If there are several models,
  /// the parameters' names begin with "0/", "1/" … Collective.
  void for_each_parameter(const std::function<void(const std::string& name, const at::Tensor& values,
                                                   const at::Tensor& gradient)>& visit) const;
  /// True inside join(), where the other workers may be at other boundaries.
  bool any_joined() const;
  /// Finishes the rounds that exceptions have ended, since other workers may wait in them. Collective if there are any.
  void finish_abandoned_rounds() const;
  /// True if any worker had been asked to stop when the gradients were last averaged.
  bool any_stop_requested() const;
  /// True if no model has gradients that an optimizer has yet to step with. Call it between two steps: each call notes
  /// this boundary, by which gradients that the program discards are recognised (Reducer::with_gradient_to_save()).
  bool have_no_gradient_to_save() const;
  /// Returns the addresses (of their TensorImpl) of all parameters of models whose gradients are averaged.
  std::set<const void*> averaged_parameters() const;
  /// Adds to `state` the gradients that an optimizer has yet to step with, averaged over the workers, and their weights
  /// if the program gives any. Changes no .grad. Collective.
  void add_gradients(StateDict& state, const StateEntries& entries, const Communicator& control) const;
  /// Sets the .grad of the State's parameters to the saved gradients, and removes .grad where none was saved. For
  /// models that are prepared later, this happens when they are prepared. `workers`: the present number of workers.
  void restore_gradients(const StateEntries& entries, state::SavedGradients saved, int workers);

 private:
  /// Gradients of a checkpoint for models that are not prepared yet.
  struct WaitingGradients {
    state::ParameterPaths paths;
    std::vector<WeakTensor> parameters;  ///< the State's parameters; held so that no other tensor gets their addresses
    state::SavedGradients saved;         ///< saved gradients that no model has received yet
    int workers;                         ///< the present number of workers
  };
  void restore_gradients_of(const gradients::PreparedModel& model);

  std::vector<std::shared_ptr<gradients::PreparedModel>> models_;
  std::optional<WaitingGradients> restored_ = {};
  std::shared_ptr<optim::LastRates> last_rates_ = std::make_shared<optim::LastRates>();
  std::shared_ptr<int> no_sync_depth_ = std::make_shared<int>(0);
};

}  // namespace muster::detail::session
