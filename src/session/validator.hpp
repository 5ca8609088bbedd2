// Validates checkpoints on this rank: which of them wait for it, when a validation may begin, when it ends, and what it
// has found.
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

/// What a validation uses. Shared, since a validation function that does not end keeps it after fit() has returned.
struct ValidationContext {
  std::shared_ptr<const run::ResolvedOptions> resolved;
  std::shared_ptr<const run::RunFolder> run;
  at::Device device;
  Communicator ranks;  ///< those that validate, in a world of their own whose timeout is the validation's
};

/// A checkpoint that waits for its validation: its manifest asks for one, and it has no validation.json.
struct PendingValidation {
  int index = 0;                        ///< of the checkpoint
  std::int64_t training_iteration = 0;  ///< of its report
};

/// What a validation has found.
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
/// begins and ends, and writes the result. The validation function has a thread of its own, so that the rank still
/// receives messages. If only one thread may call MPI, begin() runs the function and returns when it is over.
class Validator {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Decision { keep_running, finished, timed_out, out_of_time };
  /// Limit for waits that end with a validation or with training.
  static constexpr std::chrono::hours as_long_as_it_takes{24 * 365};

  /// How the validation function has ended.
  struct Outcome {
    Json metrics = Json::object();    ///< reduced over the ranks
    std::optional<Error> error = {};  ///< why there are no metrics; the same on all ranks
    bool is_in_step = true;           ///< all ranks have reached the end, so they can run the next validation
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
  /// Those that wait, on disk. Updates the rows of those that are done.
  std::vector<PendingValidation> pending(const UpdateRow& update_row,
                                         const std::vector<checkpoint::Rollback>& rollbacks) const;

  /// For validations on these ranks. Collective over them.
  std::shared_ptr<const ValidationContext> make_context(const Communicator& ranks) const;
  /// Begins; an earlier validation that still runs is given up. Collective over `context->ranks`.
  void begin(const std::shared_ptr<const ValidationContext>& context, int index);
  /// Gives the validation up, unless it is over. Where the others are done and this rank is not, it is stuck.
  void leave() noexcept;
  bool is_running() const noexcept { return outcome_.valid(); }
  bool is_over() const { return outcome_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  /// True if the validation is over and not all ranks have reached its end.
  bool is_out_of_step() const { return is_over() && !outcome_.get().is_in_step; }

  /// Tells the other ranks to wait for this validation, up to its timeout.
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
  /// The time since the validation has begun, without gaps in which this process did not run. Call it often while the
  /// validation runs.
  Clock::duration elapsed() const { return ran_ + time_.until(); }
  /// True if the work in the context was given up, and not only waited for.
  bool give_up() noexcept;

  std::shared_ptr<const run::ResolvedOptions> resolved_;
  std::shared_ptr<const run::RunFolder> run_;
  at::Device device_;
  Clock::duration slowest_{};
  bool is_stuck_ = false;
  // The validation that runs.
  std::shared_ptr<const ValidationContext> context_ = {};
  mutable comm::WaitTime time_;
  Clock::duration ran_{};                     ///< in begin()
  std::shared_future<Outcome> outcome_ = {};  ///< invalid if no validation runs
  std::thread thread_ = {};
};

}  // namespace muster::detail::session
