// Detects accumulated gradients, that is, gradients that an optimizer has yet to step with. A checkpoint does not hold
// them, so a run does not stop at a boundary where there are any.
#pragma once

#include "muster/state.hpp"
#include "session/prepared_models.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <vector>

namespace muster::detail::session {

/// A prepared model's reducer knows its own. Models that are not prepared are those of the State; of these it compares
/// each boundary with the one before: if gradients have changed and parameters have not, a backward() has added to
/// gradients that are still unused.
class AccumulatedGradients {
 public:
  explicit AccumulatedGradients(const PreparedModels& models) : prepared_(models) {}

  /// True if there are none at this boundary. `entries`: the State that would be saved; null if there is none.
  bool none(const StateEntries* entries);
  /// Call at a report with accumulated gradients. True if an optimizer has stepped since the first such report: a
  /// parameter that had a gradient there has changed. `entries` as in none().
  bool have_been_used_since(const StateEntries* entries);
  /// True if so many boundaries in a row had accumulated gradients that it is no use to wait for one without. A
  /// learning rate of 0 looks like accumulation, too.
  bool last_too_long() const noexcept { return boundaries_with_gradients_ > longest_accumulation; }

 private:
  static constexpr int longest_accumulation = 64;
  struct Model {
    std::size_t parameters = 0, gradients = 0;  ///< hashes of their bytes
    bool used = false;                          ///< the optimizer has stepped with the gradients
  };
  /// True if any of these models has accumulated gradients. Each model is a list of its parameters.
  bool any_unprepared(const std::vector<std::vector<at::Tensor>>& models);

  const PreparedModels& prepared_;
  std::map<const void*, Model> models_ = {};  ///< key: the model's first parameter
  int boundaries_with_gradients_ = 0;         ///< in a row
  std::map<const void*, std::size_t> first_ =
      {};  ///< at the first such report: hashes of the parameters with a gradient
};

}  // namespace muster::detail::session
