// The part of the ranks that do not train: they validate while the others train. The first of them, the leader, gets
// the first worker's requests, tells the others when to begin and to leave, and sends the results back.
#pragma once

#include "comm/mailbox.hpp"
#include "session/validator.hpp"

#include <map>
#include <memory>
#include <optional>

namespace muster::detail::session {

class ValidationServer {
 public:
  /// `group`: the ranks that do not train. Collective over them.
  ValidationServer(Validator& validator, comm::Mailbox& mailbox, const Communicator& group, int leader);

  /// Validates until training has ended in this attempt, and finishes the validation that has begun. Another rank's
  /// error ends the call at once (RemoteError), but not the validation, which the call in the next attempt takes over.
  void serve(int attempt);
  /// Ends the validation that is running; writes its result if it is over. On the leader.
  void end_current();
  /// On the leader: the results of all attempts, by index of the checkpoint.
  const std::map<int, ValidationResult>& results() const noexcept { return results_; }

 private:
  bool is_leader() const noexcept { return validator_.resolved().launch.rank() == leader_; }
  void handle(const Json& message, int attempt);
  /// The leader's part: ends a validation that is over, and begins the next one.
  void lead(int attempt);
  void begin_next();
  void end_job(Validator::Decision decision);
  void send_to_followers(const Json& message);

  Validator& validator_;
  comm::Mailbox& mailbox_;
  int leader_;
  std::shared_ptr<const ValidationContext> context_;
  bool is_ending_ = false;  ///< training has ended
  // On the leader; the maps' keys are indices of checkpoints.
  std::map<int, PendingValidation> queue_ = {};
  std::optional<PendingValidation> current_ = {};
  std::map<int, ValidationResult> results_ = {};
  Validator::Clock::time_point last_look_{};
};

}  // namespace muster::detail::session
