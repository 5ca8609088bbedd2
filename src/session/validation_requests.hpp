// The first worker's part in validations while it trains: it requests them and gets the results. No call waits.
#pragma once

#include "checkpoint/rollbacks.hpp"
#include "comm/mailbox.hpp"
#include "muster/checkpoint.hpp"
#include "session/validator.hpp"

#include <cstdint>
#include <mutex>
#include <set>
#include <vector>

namespace muster::detail::session {

class ValidationRequests {
 public:
  /// `mailbox`: null if no rank validates while others train; then all validations wait for the end of training.
  ValidationRequests(const Validator& validator, comm::Mailbox* mailbox, int leader)
      : validator_(validator), mailbox_(mailbox), leader_(leader) {}

  /// True if ranks validate while others train.
  bool run_beside_training() const noexcept { return mailbox_ != nullptr; }
  /// Requests the pending validations again, and updates the rows of those that are done.
  void resume(const UpdateRow& update_row, const std::vector<checkpoint::Rollback>& rollbacks);
  /// Requests a validation. The checkpoint may still be being written.
  void request(const Checkpoint& checkpoint, std::int64_t training_iteration);
  /// Updates the rows of the validations that have ended since the last call.
  void poll_results(const UpdateRow& update_row);
  /// Updates the row of a result that is new.
  void accept(const ValidationResult& result, const UpdateRow& update_row);
  bool has_accepted(int index) const { return accepted_.contains(index); }
  /// True if the row of that report waits for a result; until then its checkpoint is not pruned. From any thread.
  bool awaits_result(std::int64_t training_iteration) const;

 private:
  /// Updates the row, which then waits no more.
  void settle_row(std::int64_t training_iteration, const Json& fields, const UpdateRow& update_row);

  /// Warns once if neither a report nor its validation has the score by which the best checkpoints are kept.
  void warn_of_missing_score(const ValidationResult& result);

  const Validator& validator_;
  comm::Mailbox* mailbox_;
  int leader_;
  bool has_warned_of_score_ = false;
  std::set<int> accepted_ = {};  ///< indices of the checkpoints whose result has been merged
  mutable std::mutex rows_mutex_;
  std::set<std::int64_t> waiting_rows_ = {};  ///< training iterations whose rows wait for a result
};

}  // namespace muster::detail::session
