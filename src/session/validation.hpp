// Validations of checkpoints: which ranks run them, and how the results get into the rows of the reports.
//
// A checkpoint waits for its validation as long as its manifest asks for one and it has no validation.json; so no
// validation is lost with a rank. While the workers train, the first worker sends requests to the ranks that do not
// train. The first of these, the leader, tells the others when to begin and to leave, and sends the results back.
// Nobody waits for these messages. When training has ended, all ranks together run what is left.
#pragma once

#include "checkpoint/rollbacks.hpp"
#include "comm/mailbox.hpp"
#include "muster/checkpoint.hpp"
#include "muster/error.hpp"
#include "session/validator.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

namespace muster::detail::session {

/// This rank's part in the validations: it sends requests, or serves them.
class Validation {
 public:
  /// Collective over the world.
  Validation(std::shared_ptr<const run::ResolvedOptions> resolved, std::shared_ptr<const run::RunFolder> run,
             at::Device device);
  Validation(const Validation&) = delete;
  Validation& operator=(const Validation&) = delete;

  /// True if the trainer has a validation function.
  bool is_configured() const noexcept { return static_cast<bool>(validator_.resolved().options.validation.function); }
  /// True if ranks validate while others train; otherwise all validations wait for the end of training.
  bool runs_beside_training() const noexcept { return mailbox_.has_value(); }

  /// Call on every rank when another attempt begins.
  void begin_attempt() noexcept { ++attempt_; }

  // For the first worker, while it trains. No call waits.
  /// Requests the pending validations again, and updates the rows of those that are done.
  void resume(const UpdateRow& update_row, const std::vector<checkpoint::Rollback>& rollbacks);
  /// Requests a validation. The checkpoint may still be being written.
  void request(const Checkpoint& checkpoint, std::int64_t training_iteration);
  /// Updates the rows of the validations that have ended since the last call.
  void poll_results(const UpdateRow& update_row);
  /// True if the row of that report waits for a result; until then its checkpoint is not pruned. From any thread.
  bool awaits_result(std::int64_t training_iteration) const;
  void training_has_ended();

  /// Call on the ranks that do not train. Validates until training has ended in this attempt, and finishes the
  /// validation that has begun. Another rank's error ends the call at once (RemoteError), but not the validation, which
  /// the call in the next attempt takes over.
  void serve();
  /// Call on every rank after training. Validates what is pending on all ranks that can, unless training has failed,
  /// and updates the rows. Then prunes checkpoints if training was done or stopped, or, if `has_trained` is false, if
  /// it has validated some. Returns an Error if checkpoints are left that were not validated because of a stop, the end
  /// of the time, or a validation that did not end: ExitCode::stopped, but ExitCode::retry if the time of a start that
  /// has not trained was too short for any, since another start would not come further. It is ExitCode::retry, too, if
  /// only results are missing that could not be written. Collective over the world.
  std::optional<Error> finish(const std::optional<Error>& error, bool has_trained = true);

 private:
  /// The first of the ranks that do not train.
  int leader() const noexcept { return validator_.resolved().worker_count; }
  bool is_leader() const noexcept { return validator_.resolved().launch.rank() == leader(); }
  void handle(const Json& message);
  /// The leader's part: ends a validation that is over, and begins the next one.
  void lead();
  void begin_next();
  void end_job(Validator::Decision decision);
  void send_to_followers(const Json& message);

  /// Updates the row of a result that is new.
  void accept(const ValidationResult& result, const UpdateRow& update_row);
  /// Warns once if neither a report nor its validation has the score by which the best checkpoints are kept.
  void warn_of_missing_score(const ValidationResult& result);
  /// Updates the row, which then waits no more.
  void settle_row(std::int64_t training_iteration, const Json& fields, const UpdateRow& update_row);

  /// Tells all ranks what the leader has found. Returns its results as text. Collective.
  Json share_results();
  /// Updates the rows and returns what is left to do: [index, training_iteration] of each. Sets `update_row` on rank 0.
  /// Collective.
  Json begin_finish(bool stopped, const std::optional<Error>& error, bool prunes, UpdateRow& update_row);
  /// What is left to do: [index, training_iteration] of each. Call on rank 0.
  Json pending(const UpdateRow& update_row);
  /// Validates what is `left` on all ranks that can. Collective over the world.
  void validate_together(const Json& left, bool stopped, bool prunes, const UpdateRow& update_row);
  /// Validates one checkpoint on the ranks of the group, in the context made for them. Collective over the group.
  void validate_on(const Communicator& group, const std::shared_ptr<const ValidationContext>& all,
                   const PendingValidation& of, const UpdateRow& update_row);
  void prune() const;

  Validator validator_;
  int attempt_ = 0;
  std::optional<comm::Mailbox> mailbox_ = {};  ///< none if all ranks train, or if only one thread may call MPI
  /// Of the checkpoints by index: what the leader has found in all attempts; on the first worker, what it has accepted.
  std::map<int, ValidationResult> results_ = {};
  // On the first worker.
  bool is_out_of_time_ = false;  ///< the last validation was ended by a stop
  bool has_warned_of_score_ = false;
  mutable std::mutex rows_mutex_;
  std::set<std::int64_t> waiting_rows_ = {};  ///< training iterations whose rows wait for a result
  // On the ranks that do not train, and have a mailbox.
  std::shared_ptr<const ValidationContext> context_ = {};  ///< null on the others
  bool is_ending_ = false;                                 ///< training has ended
  // On the leader.
  std::map<int, PendingValidation> queue_ = {};  ///< by index of the checkpoint
  std::optional<PendingValidation> current_ = {};
  Validator::Clock::time_point last_look_{};
};

}  // namespace muster::detail::session
