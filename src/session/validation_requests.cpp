#include "session/validation_requests.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/validation_file.hpp"
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
  warn_of_missing_score(result);
  settle_row(result.of.training_iteration, result.fields, update_row);
}

void ValidationRequests::warn_of_missing_score(const ValidationResult& result) {
  const auto& attribute = validator_.resolved().options.run_config.checkpoint_config.checkpoint_score_attribute;
  if (attribute.empty() || has_warned_of_score_ ||
      checkpoint::status_from(result.fields) != CheckpointStatus::validated)
    return;
  const auto path = validator_.path_of(result.of.index);
  try {
    const auto metrics = checkpoint::with_validation(path, checkpoint::read_manifest(path).metrics);
    const auto score = metrics.find(attribute);
    if (score != metrics.end() && (score->is_number() || score->is_null())) return;  // NaN is null
  } catch (const Error&) {
    return;  // a damaged checkpoint is handled by the next resume
  }
  has_warned_of_score_ = true;
  log::warn("keeping the best checkpoints by \"" + attribute + "\": neither the report nor the validation of " +
            path.filename().string() +
            " has it as a number. Such checkpoints are all kept while none has it, and then count as the worst");
}

}  // namespace muster::detail::session
