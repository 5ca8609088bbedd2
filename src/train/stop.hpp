// How a wish to stop that one worker has heard of becomes one stop of all, at the same place.
//
// A wish is heeded at places that all workers come to alike: the next batch of a training pass, the next epoch, a
// report. What decides there is the same on all of them: what they have told each other, never what one has heard.
#pragma once

#include "muster/communicator.hpp"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace muster::detail::train {

/// Whether any worker has been asked to stop, as far as all of them know: the same on each at the same place.
class StopWish {
 public:
  bool known() const noexcept { return known_; }
  /// What all workers have told each other by other means: the next asking may wait.
  void hear(bool any) noexcept;
  /// At a place, of which there is one after the other. Asks the others, but only so often that it takes no more than
  /// 1% of the time from place to place. Collective.
  void ask(const Communicator& communicator, bool mine);

 private:
  using Clock = std::chrono::steady_clock;

  bool known_ = false;
  std::int64_t interval_ = 1;  ///< places from one asking to the next; the same on all workers
  std::int64_t places_ = 0;    ///< since the last one
  Clock::duration cost_{};     ///< of the last one
  Clock::time_point asked_{};
};

/// Whether gradients of models that are not prepared wait for an optimizer, which a checkpoint does not hold. Looked at
/// from place to place: where gradients have changed and parameters have not, a backward() has added to what is still
/// to be stepped with. Of a prepared model its reducer knows.
class Unspent {
 public:
  /// Each model by its parameters.
  bool look(const std::vector<std::vector<at::Tensor>>& models);

 private:
  struct Model {
    std::size_t parameters = 0, gradients = 0;  ///< hashes of their bytes
    bool spent = false;
  };
  std::map<const void*, Model> models_;  ///< by the first parameter
};

}  // namespace muster::detail::train
