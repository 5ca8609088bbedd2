// Accumulated gradients: gradients that an optimizer has yet to step with. Saves hold those of prepared models. A stop
// waits for the step if it can, since the program may count the batches of a step itself and would begin to count anew.
#pragma once

#include "gradients/tensor_changes.hpp"
#include "muster/communicator.hpp"
#include "muster/state.hpp"
#include "session/prepared_models.hpp"
#include "session/weak_tensor.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::session {

/// Finds accumulated gradients. Prepared models are asked through PreparedModels. Models that are not prepared are
/// found in the State. At each batch, these are compared with the batch before: if gradients were written to and
/// parameters have not changed, a backward() has added to gradients that no optimizer has used yet.
class AccumulatedGradients {
 public:
  explicit AccumulatedGradients(const PreparedModels& models) : prepared_(models) {}

  /// Call it when a State was restored or reported: from then on, its models are watched.
  void watch(const StateEntries& entries);
  /// Compares the models that are not prepared with their values at the last call. Called when a batch begins, and by
  /// unprepared().
  void look();
  /// True if there are no accumulated gradients at this boundary between batches, and no no_sync() scope is open. Call
  /// it once per boundary while the run is asked to stop: last_too_long() counts the calls.
  bool none();
  /// True if so many boundaries in a row had accumulated gradients that it is no use to wait for one without them.
  /// (With a learning rate of 0, each step looks like accumulation.)
  bool last_too_long() const noexcept { return boundaries_with_gradients_ > longest_accumulation; }

  /// Adds the accumulated gradients, averaged over the workers, to `state`, the state of the entries. Warns once if
  /// there are some of a model that is not prepared, since these cannot be saved. Collective.
  void add_to(StateDict& state, const StateEntries& entries, const Communicator& control);

 private:
  static constexpr int longest_accumulation = 64;
  /// A model that is not prepared.
  struct Model {
    std::vector<at::Tensor> parameters = {};
    bool accumulates = false;  ///< true if gradients were added to since the last step
    // The state when look() was last called:
    std::optional<gradients::ParameterSamples> values = {};
    std::vector<std::pair<WeakTensor, std::int64_t>> writes = {};  ///< each .grad, and torch's count of writes to it
  };
  /// Returns the name of the first State entry that is not prepared and has accumulated gradients; empty if there is
  /// none.
  std::string unprepared();

  const PreparedModels& prepared_;
  std::map<std::string, Model> models_ = {};  ///< models that are not prepared, by State entry
  std::size_t prepared_count_ = 0;            ///< number of prepared models when look() was last called
  int boundaries_with_gradients_ = 0;         ///< number of boundaries in a row that had accumulated gradients
  bool has_warned_ = false;
};

}  // namespace muster::detail::session
