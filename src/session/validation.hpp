// Validations of checkpoints: which ranks run them, and how the results get into the rows of the reports.
//
// A checkpoint waits for its validation as long as its manifest asks for one and it has no validation.json; so no
// validation is lost with a rank. While the workers train, the first worker (validation_requests.hpp) sends requests to
// the ranks that do not train (validation_server.hpp). Nobody waits for these messages. When training has ended, all
// ranks together run what is left.
#pragma once

#include "comm/mailbox.hpp"
#include "muster/error.hpp"
#include "session/validation_requests.hpp"
#include "session/validation_server.hpp"
#include "session/validator.hpp"

#include <memory>
#include <optional>

namespace muster::detail::session {

class Validation {
 public:
  /// Collective over the world.
  Validation(std::shared_ptr<const run::ResolvedOptions> resolved, std::shared_ptr<const run::RunFolder> run,
             at::Device device);
  Validation(const Validation&) = delete;
  Validation& operator=(const Validation&) = delete;

  /// True if the trainer has a validation function.
  bool is_configured() const noexcept { return static_cast<bool>(validator_.resolved().options.validation.function); }

  /// Call on every rank when another attempt begins.
  void begin_attempt() noexcept { ++attempt_; }
  /// For the first worker, while it trains.
  ValidationRequests& requests() noexcept { return *requests_; }
  /// Call on the first worker.
  void training_has_ended();
  /// Call on the ranks that do not train; see ValidationServer::serve().
  void serve();
  /// Call on every rank after training. Validates what is pending on all ranks that can, unless training has failed,
  /// and updates the rows. Then prunes checkpoints if training was done or stopped, or, if `has_trained` is false, if
  /// it has validated some. Returns an Error if checkpoints are left that were not validated because of a stop, the end
  /// of the time, or a validation that did not end: ExitCode::stopped, but ExitCode::retry if the time of a start that
  /// has not trained was too short for any, since another start would not come further. It is ExitCode::retry, too, if
  /// only results are missing that could not be written. Collective over the world.
  std::optional<Error> finish(const std::optional<Error>& error, bool has_trained = true);

 private:
  /// Tells all ranks what the leader has found. Returns its results as text. Collective.
  Json share_results();
  /// Updates the rows and returns what is left to do: [index, training_iteration] of each. Collective.
  Json begin_finish(bool stopped, const std::optional<Error>& error, bool prunes);
  /// Updates rows when no session has observers any more. On rank 0.
  UpdateRow rows_after_training() const;
  /// What is left to do: [index, training_iteration] of each. Call on rank 0.
  Json pending(const UpdateRow& update_row);
  /// Validates what is `left` on all ranks that can. Collective over the world.
  void validate_together(const Json& left, bool stopped, bool prunes);
  /// Validates one checkpoint on the ranks of the group, in the context made for them. Collective over the group.
  void validate_on(const Communicator& group, const std::shared_ptr<const ValidationContext>& all,
                   const PendingValidation& of);
  void prune() const;

  Validator validator_;
  int attempt_ = 0;
  bool is_out_of_time_ = false;                ///< on rank 0: the last validation was ended by a stop
  int leader_ = -1;                            ///< −1 if all ranks train, or if only one thread may call MPI
  std::optional<comm::Mailbox> mailbox_ = {};  ///< none without a leader
  UpdateRow update_row_ = {};                  ///< on rank 0, after training
  std::optional<ValidationRequests> requests_ = {};
  std::optional<ValidationServer> server_ = {};  ///< on the ranks that do not train
};

}  // namespace muster::detail::session
