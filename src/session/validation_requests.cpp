#include "session/validation_requests.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "storage/tier.hpp"

#include <string>

namespace muster::detail::session {

void ValidationRequests::resume(const UpdateRow& update_row, const std::vector<checkpoint::Rollback>& rollbacks) {
  const UpdateRow settle = [&](std::int64_t iteration, const Json& fields) {
    settle_row(iteration, fields, update_row);
  };
  for (const auto& [index, iteration] : validator_.pending(settle, rollbacks))
    request(Checkpoint::from_directory(validator_.path_of(index)), iteration);
}

void ValidationRequests::request(const Checkpoint& checkpoint, std::int64_t training_iteration) {
  const auto index = storage::Tier::index_of(checkpoint.path().filename());
  if (!index || mailbox_ == nullptr) return;
  {
    const std::lock_guard lock(rows_mutex_);
    waiting_rows_.insert(training_iteration);
  }
  mailbox_->send(leader_, json_text(Json{{"validate", *index}, {"training_iteration", training_iteration}}));
}

bool ValidationRequests::awaits_result(std::int64_t training_iteration) const {
  const std::lock_guard lock(rows_mutex_);
  return waiting_rows_.contains(training_iteration);
}

void ValidationRequests::settle_row(std::int64_t training_iteration, const Json& fields, const UpdateRow& update_row) {
  update_row(training_iteration, fields);
  const std::lock_guard lock(rows_mutex_);
  waiting_rows_.erase(training_iteration);
}

void ValidationRequests::poll_results(const UpdateRow& update_row) {
  if (mailbox_ == nullptr) return;
  while (const auto text = mailbox_->receive()) accept(ValidationResult::from_text(*text), update_row);
}

void ValidationRequests::accept(const ValidationResult& result, const UpdateRow& update_row) {
  if (accepted_.contains(result.of.index)) return;
  if (!result.warning.empty()) log::warn(result.warning);
  if (result.fields.is_null()) return;
  accepted_.insert(result.of.index);
  settle_row(result.of.training_iteration, result.fields, update_row);
}

}  // namespace muster::detail::session
