// How a run that is asked to stop stops: all workers at the same boundary, with nothing half done.
//
// A boundary is a point that all workers come to alike: the next batch of a training pass, the next epoch, a report.
// What decides there is the same on all of them: what they have told each other, never what one has heard.
#pragma once

#include "muster/communicator.hpp"
#include "muster/state.hpp"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace muster::detail::train {

class StopRequest {
 public:
  /// Whether any worker has been asked to stop, as far as all of them know: the same on each at the same boundary.
  bool known() const noexcept { return known_; }
  /// What the workers have told each other by other means: the next exchange() may wait.
  void learn(bool any_asked) noexcept;
  /// At every boundary. Asks the others, but only so often that it takes no more than 1% of the time from boundary to
  /// boundary. Collective.
  void exchange(const Communicator& communicator, bool asked_here);

 private:
  using Clock = std::chrono::steady_clock;

  bool known_ = false;
  std::int64_t interval_ = 1;    ///< boundaries from one exchange to the next; the same on all workers
  std::int64_t boundaries_ = 0;  ///< since the last one
  Clock::duration cost_{};       ///< of the last one
  Clock::time_point exchanged_{};
};

/// Gradients of models that are not prepared, which wait for an optimizer's step. A checkpoint does not hold them, so
/// no run stops at a boundary where there are any. (Of a prepared model its reducer knows.) Looked at from boundary to
/// boundary: where gradients have changed and parameters have not, a backward() has added to what is still to be
/// stepped with.
class AccumulatedGradients {
 public:
  /// Whether any of these models has some; each is given by its parameters.
  bool any(const std::vector<std::vector<at::Tensor>>& models);

 private:
  struct Model {
    std::size_t parameters = 0, gradients = 0;  ///< hashes of their bytes
    bool spent = false;                         ///< the optimizer has stepped with the gradients
  };
  std::map<const void*, Model> models_;  ///< by the first parameter
};

/// What a session knows of its stop.
struct Stopping {
  StopRequest request = {};
  std::int64_t averaging_passes = 0;  ///< of all models, at the last boundary
  AccumulatedGradients accumulated = {};
  int boundaries_with_gradients = 0;                  ///< one after the other, since the request is known
  std::weak_ptr<const StateEntries> last_state = {};  ///< restored or reported
  bool files_reported = false;                        ///< of the user's own
  bool told = false;                                  ///< should_stop() has said so
  bool stopped = false;                               ///< training has ended so
};

}  // namespace muster::detail::train
