// Accumulated gradients, that is, gradients that an optimizer has yet to step with: saves hold those of prepared
// models, and a stop waits for the step where it can, since a program may count its batches from one step to the next
// itself.
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

/// Finds the gradients that an optimizer has yet to step with, for a save. A prepared model's reducer knows its own.
/// Models that are not prepared are those of the State; of these it compares each batch's end with its begin: if
/// gradients have been written to and parameters have not changed, a backward() has added to gradients that are still
/// unused.
class AccumulatedGradients {
 public:
  explicit AccumulatedGradients(const PreparedModels& models) : prepared_(models) {}

  /// Call when a State was restored or reported: its models are those that are watched.
  void watch(const StateEntries& entries);
  /// Call when a batch begins, after watch(), and before each look at the models that are not prepared.
  void look();
  /// True if there are none at this boundary. Call it when the run is asked to stop.
  bool none();
  /// True if so many boundaries in a row had accumulated gradients that it is no use to wait for one without. A
  /// learning rate of 0 looks like accumulation, too.
  bool last_too_long() const noexcept { return boundaries_with_gradients_ > longest_accumulation; }

  /// Adds the gradients to `state`, which is that of the entries, averaged over the workers. Warns once of those that
  /// cannot be saved, since their model is not prepared. Collective.
  void add_to(StateDict& state, const StateEntries& entries, const Communicator& control);

 private:
  static constexpr int longest_accumulation = 64;
  /// A model that is not prepared.
  struct Model {
    std::vector<at::Tensor> parameters = {};
    bool accumulates = false;  ///< gradients were added to after the last step
    // At the last look:
    std::optional<gradients::ParameterSamples> values = {};
    std::vector<std::pair<WeakTensor, std::int64_t>> writes = {};  ///< each .grad, and torch's count of writes to it
  };
  /// The first State entry of an unprepared model that has accumulated gradients; empty if there is none.
  std::string unprepared();

  const PreparedModels& prepared_;
  std::map<std::string, Model> models_ = {};  ///< not prepared, by the State's entry
  std::size_t prepared_count_ = 0;            ///< of models, at the last look
  int boundaries_with_gradients_ = 0;         ///< in a row
  bool has_warned_ = false;
};

}  // namespace muster::detail::session
