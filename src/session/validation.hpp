// Validations of checkpoints: which ranks run them, and how the results get into the rows of the reports.
//
// A checkpoint waits for its validation as long as its manifest asks for one and it has no validation.json; so no
// validation is lost with a rank. While the workers train, the first worker sends requests to the first of the other
// ranks (the leader). The leader tells the other ranks that do not train when to begin, and sends the result back to
// the first worker. Nobody waits for these messages. When training has ended, all ranks together run what is left.
#pragma once

#include "checkpoint/rollbacks.hpp"
#include "comm/mailbox.hpp"
#include "muster/checkpoint.hpp"
#include "session/validation_job.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::session {

class Validation {
 public:
  /// Collective over the world.
  Validation(std::shared_ptr<const run::ResolvedOptions> resolved, std::shared_ptr<const run::RunFolder> run,
             at::Device device);

  /// True if the trainer has a validation function.
  bool is_configured() const noexcept { return static_cast<bool>(resolved_->options.validation.function); }

  /// Call on every rank when another attempt begins.
  void begin_attempt() noexcept { ++attempt_; }

  // On the first worker, while it trains. All of these return at once.

  /// Puts a result into the row of that report.
  using UpdateRow = std::function<void(std::int64_t training_iteration, const Json& fields)>;
  /// Requests the pending validations again, and updates the rows of those that are done.
  void resume(const UpdateRow& update_row, const std::vector<checkpoint::Rollback>& rollbacks);
  /// Requests a validation. The checkpoint may still be being written.
  void request(const Checkpoint& checkpoint, std::int64_t training_iteration);
  /// Updates the rows of the validations that have ended since the last call.
  void poll_results(const UpdateRow& update_row);
  void training_has_ended();
  /// True if the row of that report waits for a result; until then its checkpoint is not pruned. From any thread.
  bool awaits_result(std::int64_t training_iteration) const;

  // On the ranks that do not train.

  /// Validates until training has ended, and finishes the validation that has begun. Another rank's error ends the call
  /// at once (RemoteError), but not the validation, which the call in the next attempt takes over.
  void serve();

  // On every rank, after training.

  /// Validates what is pending on all ranks that can, unless training has failed, and updates the rows. Then prunes
  /// checkpoints if training was done or stopped; not if it failed or `has_trained` is false. Collective over the
  /// world.
  void finish(const std::optional<Error>& error, bool has_trained = true);

 private:
  using Clock = ValidationJob::Clock;
  struct Pending {
    int index = 0;
    std::int64_t training_iteration = 0;
  };
  /// The result of one validation.
  struct ValidationResult {
    Pending of;
    Json fields = {};          ///< for validation.json; null if the validation is to be tried again
    std::string warning = {};  ///< if it has not succeeded

    std::string to_text() const;
    static ValidationResult from_text(const std::string& text);
  };
  enum class Decision { keep_running, finished, timed_out, out_of_time };

  bool is_leader() const noexcept { return resolved_->launch.rank() == leader_; }
  std::shared_ptr<const ValidationContext> make_context(const Communicator& ranks) const;
  std::filesystem::path path_of(int index) const;
  /// The pending validations on disk. Updates the rows of those that are done.
  std::vector<Pending> pending(const UpdateRow& update_row, const std::vector<checkpoint::Rollback>& rollbacks) const;

  void handle(const Json& message);
  /// The leader's part: ends a job that is over, and begins the next one.
  void lead();
  void begin_next();
  /// True if there is time for another validation. Called by the leader.
  bool may_begin(bool asked_to_stop) const;
  /// Whether the current job goes on, or why it ends. Called by the leader. `at_the_end`: training has ended.
  Decision decide(bool at_the_end) const;
  /// Writes validation.json for the job of that checkpoint and returns the result.
  ValidationResult write_result(const Pending& of, Decision decision);
  void end_job(Decision decision);
  /// Updates the row of a result that is new. On the first rank.
  void accept(const ValidationResult& result, const UpdateRow& update_row);
  /// Updates the row, which then waits no more.
  void settle_row(std::int64_t training_iteration, const Json& fields, const UpdateRow& update_row);
  /// Updates the rows and returns what is left to do: [index, training_iteration] of each. Collective.
  Json begin_finish(bool stopped, const std::optional<Error>& error, bool prunes);
  void send_to_followers(const Json& message);

  std::shared_ptr<const run::ResolvedOptions> resolved_;
  std::shared_ptr<const run::RunFolder> run_;
  at::Device device_;
  int attempt_ = 0;
  bool stuck_ = false;  ///< a validation function has not ended on this rank, or on one that it validates with
  Clock::duration slowest_{};

  // Validation during training. Unused if all ranks train, or if only one thread may call MPI.
  int leader_ = -1;
  std::optional<comm::Mailbox> mailbox_ = {};
  std::shared_ptr<const ValidationContext> context_ = {};  ///< set on the ranks that do not train
  std::map<int, Pending> queue_ = {};                      ///< on the leader; by index of the checkpoint
  std::optional<Pending> current_ = {};
  std::optional<ValidationJob> job_ = {};
  Clock::time_point last_look_{};
  bool ending_ = false;                           ///< training has ended
  std::map<int, ValidationResult> results_ = {};  ///< on the leader; by index of the checkpoint
  std::set<int> accepted_ = {};                   ///< on the first worker: indices of the checkpoints
  mutable std::mutex rows_mutex_;
  std::set<std::int64_t> waiting_rows_ = {};  ///< training iterations whose rows wait for a result
};

}  // namespace muster::detail::session
