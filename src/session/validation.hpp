// Validations of checkpoints: which ranks run them, and how the results get into the rows of the reports.
//
// A validation of a checkpoint is pending if the checkpoint's manifest asks for it and there is no validation.json; so
// no validation is lost when a rank fails. While the workers train, the first worker sends requests to the ranks that
// do not train. The first of these ranks is the leader: it tells the others when to begin and to end a validation, and
// sends the results back. Nobody waits for these messages. After training, all ranks together run the validations that
// are left.
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

/// This rank's part in validations: the first worker sends requests, the ranks that do not train carry them out.
class Validation {
 public:
  /// Collective over the world.
  Validation(std::shared_ptr<const run::ResolvedOptions> resolved, std::shared_ptr<const run::RunFolder> run,
             at::Device device);
  Validation(const Validation&) = delete;
  Validation& operator=(const Validation&) = delete;

  /// True if the trainer has a validation function.
  bool is_configured() const noexcept { return static_cast<bool>(validator_.resolved().options.validation.function); }
  /// True if some ranks validate while the others train; if not, all validations run after training.
  bool runs_beside_training() const noexcept { return mailbox_.has_value(); }

  /// Call it on every rank when an attempt begins.
  void begin_attempt() noexcept { ++attempt_; }

  // The following functions, up to training_has_ended(), are for the first worker while it trains. None of them waits.
  /// Requests the pending validations of earlier attempts again, and updates the rows of those that have results.
  void resume(const UpdateRow& update_row, const std::vector<checkpoint::Rollback>& rollbacks);
  /// Requests a validation; does nothing unless runs_beside_training(). A save in the background may still be writing
  /// the checkpoint.
  void request(const Checkpoint& checkpoint, std::int64_t training_iteration);
  /// Updates the rows of validations whose results have come since the last call.
  void poll_results(const UpdateRow& update_row);
  /// True if the report's row waits for a result; as long as it does, its checkpoint is not pruned. May be called on
  /// any thread.
  bool awaits_result(std::int64_t training_iteration) const;
  /// Tells the leader that training has succeeded in this attempt. Then serve() returns when no validation is running.
  void training_has_ended();

  /// Call it on the ranks that do not train. Carries out validations until training has ended in this attempt and no
  /// validation is running. If another rank fails, the call throws RemoteError at once; a running validation continues,
  /// and the call in the next attempt takes it over.
  void serve();
  /// Call it on every rank after training. Unless training has failed, all ranks that are not stuck run the pending
  /// validations together; the rows are updated in any case. Then prunes checkpoints if training is done or was
  /// stopped; if `has_trained` is false, only if it has validated some. Returns an Error if a checkpoint is still not
  /// validated: ExitCode::stopped if a stop, the end of the time or a validation that does not end is the cause;
  /// ExitCode::retry if this start has not trained and its time was not enough for a single validation, since another
  /// start of this kind would not get further; ExitCode::retry also if all could begin but some results were not kept.
  /// Collective over the world.
  std::optional<Error> finish(const std::optional<Error>& error, bool has_trained = true);

 private:
  /// The first of the ranks that do not train.
  int leader() const noexcept { return validator_.resolved().worker_count; }
  bool is_leader() const noexcept { return validator_.resolved().launch.rank() == leader(); }
  void handle(const Json& message);
  /// For the leader: ends a validation that is over. Then begins the next, or tells the others that training has ended.
  void lead();
  void begin_next();
  void end_validation(Validator::Decision decision);
  void send_to_followers(const Json& message);

  /// Records a result and updates the row of its report, unless the result is known already. If the validation must be
  /// tried again, only warns.
  void accept(const ValidationResult& result, const UpdateRow& update_row);
  /// Warns once if neither the report nor its validation has the score by which the best checkpoints are chosen.
  void warn_of_missing_score(const ValidationResult& result);
  /// Updates the row; afterwards the row no longer waits.
  void settle_row(std::int64_t training_iteration, const Json& fields, const UpdateRow& update_row);

  /// Ends a validation that is still running. Then gives all ranks the leader's results, and returns them as text.
  /// Collective.
  Json broadcast_results();
  /// Updates the rows and returns the pending validations, each as [index, training_iteration]; none if training has
  /// failed or there is no time for any. If there are none, prunes checkpoints if `prunes` is true. Sets `update_row`
  /// on rank 0. Collective.
  Json begin_finish(bool stopped, const std::optional<Error>& error, bool prunes, UpdateRow& update_row);
  /// Returns the pending validations, each as [index, training_iteration]; updates the rows of the others. On rank 0.
  Json pending(const UpdateRow& update_row);
  /// Validates the checkpoints `left`, as long as there is time, on all ranks that are not stuck. Collective over the
  /// world.
  void validate_together(const Json& left, bool stopped, bool prunes, const UpdateRow& update_row);
  /// Validates one checkpoint on the ranks of `group`, for which the context `all` was made. Collective over the group.
  void validate_on(const Communicator& group, const std::shared_ptr<const ValidationContext>& all,
                   const PendingValidation& of, const UpdateRow& update_row);
  void prune() const;

  Validator validator_;
  int attempt_ = 0;
  std::optional<comm::Mailbox> mailbox_ = {};  ///< none if all ranks train, or if only one thread may call MPI
  /// By index of the checkpoint. On the leader, the results of all attempts; on the first worker, the accepted results.
  std::map<int, ValidationResult> results_ = {};
  // For the first worker:
  bool is_out_of_time_ = false;  ///< true if a stop or the end of the time has ended the last validation
  bool has_warned_of_score_ = false;
  mutable std::mutex rows_mutex_;
  std::set<std::int64_t> waiting_rows_ = {};  ///< training iterations whose rows wait for a result
  // For the ranks that do not train, if there is a mailbox:
  std::shared_ptr<const ValidationContext> context_ = {};  ///< null on ranks that train
  bool is_ending_ = false;                                 ///< true when training has ended
  // For the leader:
  std::map<int, PendingValidation> queue_ = {};  ///< by index of the checkpoint
  std::optional<PendingValidation> current_ = {};
  Validator::Clock::time_point last_look_{};
};

}  // namespace muster::detail::session
