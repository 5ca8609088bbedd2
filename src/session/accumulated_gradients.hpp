// Accumulated gradients: gradients that an optimizer has yet to step with. Checkpoints hold those of prepared models. A
// stop waits for the optimizer's step while there is time: a program that counts the batches of a step itself begins to
// count anew when it is resumed.
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

/// Finds accumulated gradients. PreparedModels knows those of prepared models. Models that are not prepared are found
/// in the State. When a batch begins, their gradients and parameters are compared with those of the batch before: if
/// gradients were written to and parameters have not changed, no optimizer has stepped with these gradients yet.
class AccumulatedGradients {
 public:
  explicit AccumulatedGradients(const PreparedModels& models) : prepared_(models) {}

  /// Call it when a State was restored or reported. From then on, only the models of this State are watched.
  void watch(const StateEntries& entries);
  /// Compares the models that are not prepared with their values at the last call. Called when a batch begins, and by
  /// the other functions of this class that need a comparison.
  void compare();
  /// True if there are no accumulated gradients at this boundary between batches, and no no_sync() scope is open. Call
  /// it once per boundary while the run is asked to stop: have_lasted_too_long() counts the calls.
  bool none();
  /// True if so many boundaries in a row had accumulated gradients that it is no use to wait for one without them.
  /// (With a learning rate of 0, each step looks like accumulation.)
  bool have_lasted_too_long() const noexcept { return boundaries_with_gradients_ > longest_accumulation; }

  /// Adds the accumulated gradients of prepared models, averaged over the workers, to `state`, the state of the
  /// entries. Warns once if a model that is not prepared has accumulated gradients, since they cannot be saved.
  /// Collective.
  void add_to(StateDict& state, const StateEntries& entries, const Communicator& control);

 private:
  static constexpr int longest_accumulation = 64;
  /// A model that is not prepared.
  struct Model {
    std::vector<at::Tensor> parameters = {};
    bool accumulates = false;  ///< true if a gradient has values that no optimizer has stepped with
    // The state when compare() was last called:
    std::optional<gradients::ParameterSamples> values = {};
    std::vector<std::pair<WeakTensor, std::int64_t>> writes = {};  ///< each .grad, and torch's count of writes to it
  };
  /// Returns the name of the first State entry whose model is not prepared and has accumulated gradients; empty if
  /// there is none.
  std::string find_unprepared();

  const PreparedModels& prepared_;
  std::map<std::string, Model> models_ = {};  ///< models that are not prepared, by State entry
  std::size_t prepared_count_ = 0;            ///< number of prepared models when compare() was last called
  int boundaries_with_gradients_ = 0;         ///< number of boundaries in a row that had accumulated gradients
  bool has_warned_ = false;
};

}  // namespace muster::detail::session
