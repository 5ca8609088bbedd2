// Validates checkpoints on this rank: finds the pending ones, decides when a validation may begin and when it ends, and
// writes the result.
#pragma once

#include "checkpoint/rollbacks.hpp"
#include "comm/wait.hpp"
#include "muster/communicator.hpp"
#include "muster/error.hpp"
#include "run/resolve.hpp"
#include "run/run_folder.hpp"

#include <c10/core/Device.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace muster::detail::session {

/// What a validation uses. Shared ownership, since a validation function that does not end uses it after fit() has
/// returned.
struct ValidationContext {
  std::shared_ptr<const run::ResolvedOptions> resolved;
  std::shared_ptr<const run::RunFolder> run;
  at::Device device;
  Communicator ranks;  ///< the ranks that validate, in a world of their own with the validation's timeout
};

/// A checkpoint that has yet to be validated: its manifest asks for it, and there is no validation.json.
struct PendingValidation {
  int index = 0;                        ///< of the checkpoint
  std::int64_t training_iteration = 0;  ///< of the checkpoint's report
};

/// The result of a validation.
struct ValidationResult {
  PendingValidation of;
  Json fields = {};          ///< contents of validation.json; null if the validation must be tried again
  std::string warning = {};  ///< set if the validation has not succeeded

  std::string to_text() const;
  static ValidationResult from_text(const std::string& text);
};

/// Puts the result of a validation into the row of a report.
using UpdateRow = std::function<void(std::int64_t training_iteration, const Json& fields)>;

/// Runs one validation after another on this rank. If several ranks validate together, the first of them decides when a
/// validation begins and ends, and writes the result. The validation function runs on a thread of its own, so that the
/// rank still receives messages. If only one thread may call MPI, begin() runs the function itself and returns when it
/// has ended.
class Validator {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Decision { keep_running, finished, timed_out, out_of_time };
  /// Timeout for waits that only the end of a validation or of training ends.
  static constexpr std::chrono::hours as_long_as_it_takes{24 * 365};

  /// How the validation function has ended on this rank.
  struct Outcome {
    Json metrics = Json::object();    ///< reduced over the ranks
    std::optional<Error> error = {};  ///< why there are no metrics; the same on all ranks if they are in step
    bool is_in_step = true;  ///< true if all ranks have reached the end, so that they can run the next validation
  };

  Validator(std::shared_ptr<const run::ResolvedOptions> resolved, std::shared_ptr<const run::RunFolder> run,
            at::Device device)
      : resolved_(std::move(resolved)), run_(std::move(run)), device_(device) {}
  Validator(const Validator&) = delete;
  Validator& operator=(const Validator&) = delete;
  ~Validator() { leave(); }

  const run::ResolvedOptions& resolved() const noexcept { return *resolved_; }
  const run::RunFolder& run() const noexcept { return *run_; }
  std::filesystem::path path_of(int index) const;
  /// Returns the validations that are pending, as the run's files tell. Updates the rows of those that have a result.
  std::vector<PendingValidation> pending(const UpdateRow& update_row,
                                         const std::vector<checkpoint::Rollback>& rollbacks) const;

  /// Makes the context for validations on these ranks. Collective over them.
  std::shared_ptr<const ValidationContext> make_context(const Communicator& ranks) const;
  /// Begins a validation. If an earlier one is still running, it is given up. Collective over `context->ranks`.
  void begin(const std::shared_ptr<const ValidationContext>& context, int index);
  /// Ends the validation: waits for it if it is about to end, else gives it up. If it does not end together with the
  /// other ranks', this rank is stuck.
  void leave() noexcept;
  bool is_running() const noexcept { return outcome_.valid(); }
  bool is_over() const { return outcome_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  /// True if the validation is over but some rank has not reached its end.
  bool is_out_of_step() const { return is_over() && !outcome_.get().is_in_step; }

  /// Tells the other ranks to wait for this validation, up to its timeout.
  void keep_others_waiting() const;
  /// If the launch has a time limit: true if there is time for a validation as slow as the slowest so far; but if
  /// `asked_to_stop`, false until one has succeeded, since before that its time is unknown. Without a time limit: true
  /// unless `asked_to_stop` or the launch has been asked to stop.
  bool may_begin(bool asked_to_stop) const;
  /// Decides whether the validation goes on, or why it ends. `at_the_end`: true after training; before that, only the
  /// validation's own end and its timeout count.
  Decision decide(bool at_the_end) const;
  /// Writes validation.json for the validation that has ended by `decision`, and returns the result. Writes nothing if
  /// it was out of time. If the file cannot be written, the result has a warning and no fields.
  ValidationResult write_result(const PendingValidation& of, Decision decision);

  /// How long the slowest successful validation took; 0 if there was none.
  Clock::duration slowest() const noexcept { return slowest_; }
  void note_slowest(Clock::duration time) noexcept { slowest_ = std::max(slowest_, time); }
  /// True if a validation function has not ended on this rank or on a rank that validates together with it. Then this
  /// rank validates nothing more.
  bool is_stuck() const noexcept { return is_stuck_; }
  void set_stuck(bool is_stuck) noexcept { is_stuck_ = is_stuck; }

 private:
  /// The time since the validation began, without times in which this process was suspended. Call it often while the
  /// validation runs.
  Clock::duration elapsed() const { return ran_ + time_.until(); }
  /// Gives the validation up. False if it has ended by itself meanwhile.
  bool give_up() noexcept;

  std::shared_ptr<const run::ResolvedOptions> resolved_;
  std::shared_ptr<const run::RunFolder> run_;
  at::Device device_;
  Clock::duration slowest_{};
  bool is_stuck_ = false;
  // For the current validation:
  std::shared_ptr<const ValidationContext> context_ = {};
  mutable comm::WaitTime time_;
  Clock::duration ran_{};                     ///< how long it ran inside begin(), if begin() ran it
  std::shared_future<Outcome> outcome_ = {};  ///< invalid if there is no validation
  std::thread thread_ = {};
};

}  // namespace muster::detail::session
