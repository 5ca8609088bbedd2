// The session of one attempt of training on one worker, from its begin to its end. fit() opens one for each attempt;
// the operator trainer keeps one open for all its calls.
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

/// Owns a session, runs the program's code in it, and ends it after success or an error.
class MUSTER_INTERNAL_API OpenSession {
 public:
  /// `workers` is the communicator for the training function; `control` has the same ranks and is for muster's own use.
  OpenSession(const run::ResolvedOptions& resolved, const run::RunFolder& run, const Communicator& workers,
              const Communicator& control, at::Device device, BadSteps& bad_steps);

  /// Sets threads and random generators, resumes from a checkpoint, starts the backend and the callbacks, and then the
  /// clock. Collective.
  void open();
  /// Runs `work`: the training function, or a call of an operator. If muster has ended the attempt, throws the
  /// exception that ended it, even if `work` has caught it and returns or throws another exception.
  void run(const std::function<void()>& work);
  /// Call it when training has succeeded. Collective.
  void close();
  /// Call it when training has thrown and the other ranks have been told. Like end() with the error `cause`.
  void fail(const comm::Outcome& cause) noexcept { end(Error(cause.code, cause.text)); }
  /// Ends the session on this worker without waiting for the other workers, except for a save in the background.
  /// `error`: why training has ended; none after success.
  void end(const std::optional<Error>& error) noexcept;

  SessionState& state() noexcept { return state_; }
  /// The session that the training function gets.
  Session& user_session() noexcept { return user_session_; }

 private:
  SessionState state_;
  Session user_session_;
  std::shared_ptr<Backend> backend_;  ///< set between its start and its shutdown
  c10::DeviceGuard device_;           ///< makes `device` current, so that at::kCUDA without an index means it
};

}  // namespace muster::detail::session
