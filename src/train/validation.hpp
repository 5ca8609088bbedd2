// Validations of checkpoints: who is asked for them, and what becomes of what they find.
//
// A checkpoint is to be validated as long as its manifest says that this was asked for and no validation.json lies
// beside it; so nothing is forgotten, whoever is lost. While the workers train, the first of them tells the first of
// the ranks that do not (the leader), which tells the others of those when to begin; what is found goes the same way
// back. Nobody waits for such a word. When training has ended, all ranks together do what is left.
#pragma once

#include "checkpoint/rollbacks.hpp"
#include "comm/mailbox.hpp"
#include "muster/checkpoint.hpp"
#include "train/validation_job.hpp"

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

namespace muster::detail::train {

class Validation {
 public:
  /// Collective over the world.
  Validation(std::shared_ptr<const Plan> plan, std::shared_ptr<const RunFolder> run, at::Device device);

  /// Whether the trainer has a function that validates.
  bool possible() const noexcept { return static_cast<bool>(plan_->options.validation.function); }

  /// Another attempt begins. On every rank.
  void begin_attempt() noexcept { ++attempt_; }

  // On the first worker, while it trains; all of them return at once.

  /// What was found, to be put into that report's row.
  using Tell = std::function<void(std::int64_t training_iteration, const Json& fields)>;
  /// Asks again for what is pending, and tells what is not.
  void resume(const Tell& tell, const std::vector<checkpoint::Rollback>& rollbacks);
  /// The checkpoint may still be being written.
  void request(const Checkpoint& checkpoint, std::int64_t training_iteration);
  /// Tells what has been found since.
  void take(const Tell& tell);
  void training_has_ended();
  /// Whether the row of that report has yet to be told what is found: its checkpoint stays until then. From any thread.
  bool owes(std::int64_t training_iteration) const;

  // On the ranks that do not train.

  /// Until training has ended, and what has begun too. Another rank's error ends it at once (RemoteError); it goes on
  /// with the next attempt.
  void serve();

  // On every rank, after training.

  /// Validates what is pending, by all ranks that can, unless training has failed, and brings the rows up to date. Then
  /// prunes checkpoints, if training was done or stopped; not if it failed or `has_trained` is false. Collective over
  /// the world.
  void finish(const std::optional<Error>& error, bool has_trained = true);

 private:
  using Clock = ValidationJob::Clock;
  struct Pending {
    int index = 0;
    std::int64_t training_iteration = 0;
  };
  /// What a validation has come to.
  struct Found {
    Pending of;
    Json fields = {};          ///< of validation.json; null where it is to be tried again
    std::string warning = {};  ///< if it has not gone well

    std::string text() const;
    static Found from(const std::string& text);
  };
  enum class Verdict { goes_on, over, too_long, no_time };

  bool leads() const noexcept { return plan_->launch.rank() == leader_; }
  std::shared_ptr<const ValidationGround> ground(const Communicator& ranks) const;
  std::filesystem::path path_of(int index) const;
  /// Those on disk that are pending; of the others `tell` is told what was found.
  std::vector<Pending> pending(const Tell& tell, const std::vector<checkpoint::Rollback>& rollbacks) const;

  void hear(const Json& letter);
  void lead();
  void begin_next();
  /// Whether another may begin, and what the one that has begun has come to: by the leader of its ranks.
  bool may_begin(bool asked_to_stop) const;
  Verdict judge(bool at_the_end) const;
  /// Writes what the job of that checkpoint has come to.
  Found conclude(const Pending& of, Verdict verdict);
  void end_job(Verdict verdict);
  /// On the first rank: says it once.
  void take(const Found& found, const Tell& tell);
  void tell_row(std::int64_t training_iteration, const Json& fields, const Tell& tell);
  /// Brings the rows up to date; what is left to do, [index, training_iteration] of each. Collective.
  Json begin_finish(bool stopped, const std::optional<Error>& error, bool prunes);
  void tell_others(const Json& letter);

  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<const RunFolder> run_;
  at::Device device_;
  int attempt_ = 0;
  bool stuck_ = false;  ///< a function has not ended here, or on a rank that this one validates with
  Clock::duration slowest_{};

  // Beside training; nothing where all ranks train, or MPI may be called by one thread alone.
  int leader_ = -1;
  std::optional<comm::Mailbox> mailbox_ = {};
  std::shared_ptr<const ValidationGround> beside_ = {};  ///< on the ranks that do not train
  std::map<int, Pending> waiting_ = {};                  ///< of the leader, by index
  std::optional<Pending> current_ = {};
  std::optional<ValidationJob> job_ = {};
  Clock::time_point looked_{};
  bool ending_ = false;
  std::map<int, Found> found_ = {};  ///< by the leader
  std::set<int> taken_ = {};         ///< by the first worker: their indices
  mutable std::mutex owing_;
  std::set<std::int64_t> owed_ = {};  ///< to the rows of these reports
};

}  // namespace muster::detail::train
