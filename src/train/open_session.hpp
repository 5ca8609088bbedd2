// One attempt of training on one worker, from its opening to its end. The operator trainer keeps one open over several
// calls; fit() opens one for each attempt.
#pragma once

#include "comm/agreement.hpp"
#include "muster/error.hpp"
#include "train/session_state.hpp"

#include <c10/core/DeviceGuard.h>

#include <optional>

namespace muster::detail::train {

class OpenSession {
 public:
  /// `workers` is for the training function's own use, `control` the same ranks over another channel.
  OpenSession(const Plan& plan, const RunFolder& run, const Communicator& workers, const Communicator& control,
              at::Device device, BadSteps& bad_steps);

  /// Threads, random generators, what is to be gone on from, backend, callbacks; the clock begins. Collective.
  void open();
  /// Training has ended well. Collective.
  void close();
  /// Training has ended with an exception, of which the other ranks have been told: waits for nobody.
  void fail(const comm::Outcome& cause) noexcept { leave(Error(cause.code, cause.text)); }
  /// Training is over on this worker, with an error or without: waits for nobody.
  void leave(const std::optional<Error>& error) noexcept;

  SessionState& state() noexcept { return state_; }
  /// What the user sees.
  Session& view() noexcept { return view_; }

 private:
  SessionState state_;
  Session view_;
  c10::DeviceGuard device_;  ///< for the user's at::kCUDA without a number
};

}  // namespace muster::detail::train
