// The validations of checkpoints that wait for one: when one may begin, when it ends, and what it has found.
#pragma once

#include "checkpoint/rollbacks.hpp"
#include "session/validation_job.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::session {

/// A checkpoint that waits for its validation: its manifest asks for one, and it has no validation.json.
struct PendingValidation {
  int index = 0;                        ///< of the checkpoint
  std::int64_t training_iteration = 0;  ///< of its report
};

struct ValidationResult {
  PendingValidation of;
  Json fields = {};          ///< for validation.json; null if the validation is to be tried again
  std::string warning = {};  ///< if it has not succeeded

  std::string to_text() const;
  static ValidationResult from_text(const std::string& text);
};

/// Puts a result into the row of that report.
using UpdateRow = std::function<void(std::int64_t training_iteration, const Json& fields)>;

/// Runs one validation after another on this rank. Of the ranks that validate together, the first one decides when one
/// begins and ends, and writes the result.
class Validator {
 public:
  using Clock = ValidationJob::Clock;
  enum class Decision { keep_running, finished, timed_out, out_of_time };
  /// Limit for waits that end with a validation or with training.
  static constexpr std::chrono::hours as_long_as_it_takes{24 * 365};

  Validator(std::shared_ptr<const run::ResolvedOptions> resolved, std::shared_ptr<const run::RunFolder> run,
            at::Device device)
      : resolved_(std::move(resolved)), run_(std::move(run)), device_(device) {}

  const run::ResolvedOptions& resolved() const noexcept { return *resolved_; }
  const run::RunFolder& run() const noexcept { return *run_; }
  std::filesystem::path path_of(int index) const;
  /// Those that wait, on disk. Updates the rows of those that are done.
  std::vector<PendingValidation> pending(const UpdateRow& update_row,
                                         const std::vector<checkpoint::Rollback>& rollbacks) const;

  /// For validations on these ranks. Collective over them.
  std::shared_ptr<const ValidationContext> make_context(const Communicator& ranks) const;
  /// Begins; an earlier validation that still runs is given up. Collective over `context->ranks`.
  void begin(const std::shared_ptr<const ValidationContext>& context, int index);
  /// Gives the validation up, unless it is over. Where the others are done and this rank is not, it is stuck.
  void leave() noexcept {
    if (job_ && !job_->leave()) is_stuck_ = true;
    job_.reset();
  }
  bool is_running() const noexcept { return job_.has_value(); }
  bool is_over() const { return job_->is_over(); }
  /// True if the validation is over and not all ranks have reached its end.
  bool is_out_of_step() const { return job_->is_over() && !job_->outcome().is_in_step; }

  /// Tells the other ranks to wait for this validation, up to its time-out.
  void keep_others_waiting() const;
  /// True if there is time for another validation.
  bool may_begin(bool asked_to_stop) const;
  /// Whether the validation goes on, or why it ends. `at_the_end`: training has ended.
  Decision decide(bool at_the_end) const;
  /// Writes validation.json for the validation that has ended so, and returns the result.
  ValidationResult write_result(const PendingValidation& of, Decision decision);

  /// The longest validation that has succeeded; 0 if there was none.
  Clock::duration slowest() const noexcept { return slowest_; }
  void note_slowest(Clock::duration time) noexcept { slowest_ = std::max(slowest_, time); }
  /// True if a validation function has not ended on this rank, or on one that it validates with. Then it validates
  /// nothing more.
  bool is_stuck() const noexcept { return is_stuck_; }
  void set_stuck(bool is_stuck) noexcept { is_stuck_ = is_stuck; }

 private:
  std::shared_ptr<const run::ResolvedOptions> resolved_;
  std::shared_ptr<const run::RunFolder> run_;
  at::Device device_;
  std::optional<ValidationJob> job_ = {};
  Clock::duration slowest_{};
  bool is_stuck_ = false;
};

}  // namespace muster::detail::session
