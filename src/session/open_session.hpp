// The session of one attempt of training on one worker, from its opening to its end. fit() opens one for each attempt;
// the operator trainer keeps one open over all its calls.
#pragma once

#include "base/export.hpp"
#include "comm/agreement.hpp"
#include "muster/error.hpp"
#include "session/session_state.hpp"

#include <c10/core/DeviceGuard.h>

#include <functional>
#include <memory>
#include <optional>

namespace muster::detail::session {

/// Owns a session, runs work of the program in it, and ends it well or with an error.
class MUSTER_INTERNAL_API OpenSession {
 public:
  /// `workers` is for the training function's use; `control` has the same ranks over another channel.
  OpenSession(const run::ResolvedOptions& resolved, const run::RunFolder& run, const Communicator& workers,
              const Communicator& control, at::Device device, BadSteps& bad_steps);

  /// Sets threads and random generators, resumes from a checkpoint, starts backend and callbacks, and then the clock.
  /// Collective.
  void open();
  /// Runs the training function, or a call of an operator. Throws what has ended the attempt, even if `work` has caught
  /// it and returns or throws another exception.
  void run(const std::function<void()>& work);
  /// Call when training has succeeded. Collective.
  void close();
  /// Call when training has thrown and the other ranks have been told. Waits for no other rank.
  void fail(const comm::Outcome& cause) noexcept { end(Error(cause.code, cause.text)); }
  /// Call when training is over on this worker, with an error or without. Waits for no other rank.
  void end(const std::optional<Error>& error) noexcept;

  SessionState& state() noexcept { return state_; }
  /// The user's session.
  Session& user_session() noexcept { return user_session_; }

 private:
  SessionState state_;
  Session user_session_;
  std::shared_ptr<Backend> backend_;  ///< set between its start and its shutdown
  c10::DeviceGuard device_;           ///< so that the user's at::kCUDA without an index is this device
};

}  // namespace muster::detail::session
