#include "session/validator.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "comm/make_world.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/rank_status.hpp"
#include "comm/time_limit.hpp"
#include "storage/tier.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace muster::detail::session {
namespace {

using namespace std::chrono_literals;
using storage::tier_of;

/// Added to a validation's time-out: time to notice that it was given up, and to write the result.
constexpr auto end_allowance = 30s;
/// Time that is kept for the run's end after the last validation.
constexpr auto time_reserve = 1s;

/// Null for each metric that an earlier validation of this run has given, except those that were reported.
Json earlier_names_as_null(const storage::Tier& tier, const Json& reported) {
  Json nulls = Json::object();
  for (const auto& [index, path] : tier.list().published)
    if (const auto fields = checkpoint::read_validation(path))
      for (const auto& [name, value] : fields->items())
        if (!reported.contains(name)) nulls[name] = nullptr;
  return nulls;
}

}  // namespace

std::string ValidationResult::to_text() const {
  return json_text_lossy(Json{
      {"index", of.index}, {"training_iteration", of.training_iteration}, {"fields", fields}, {"warning", warning}});
}

ValidationResult ValidationResult::from_text(const std::string& text) {
  const auto json = json_from_text(text);
  return {.of = {json.at("index").get<int>(), json.at("training_iteration").get<std::int64_t>()},
          .fields = json.at("fields"),
          .warning = json.at("warning").get<std::string>()};
}

std::shared_ptr<const ValidationContext> Validator::make_context(const Communicator& ranks) const {
  const auto own_world = comm::make_separate_world(ranks);
  if (comm::threads_may_call_mpi()) comm::set_time_limit(own_world, resolved_->options.validation.timeout);
  return std::make_shared<ValidationContext>(ValidationContext{resolved_, run_, device_, own_world});
}

std::filesystem::path Validator::path_of(int index) const { return tier_of(run_->path())->published(index); }

std::vector<PendingValidation> Validator::pending(const UpdateRow& update_row,
                                                  const std::vector<checkpoint::Rollback>& rollbacks) const {
  std::vector<PendingValidation> pending;
  for (const auto& [index, path] : tier_of(run_->path())->list().published) try {
      if (checkpoint::is_rolled_back(rollbacks, index)) continue;  // another report has its row now
      const auto reported = checkpoint::read_manifest(path).metrics;
      if (checkpoint::status_from(reported) != CheckpointStatus::pending_validation) continue;
      const auto iteration = reported.value("training_iteration", std::int64_t{0});
      if (const auto found = checkpoint::read_validation(path))
        update_row(iteration, *found);
      else
        pending.push_back({index, iteration});
    } catch (const Error& error) {
      log::warn("looking whether " + path.filename().string() + " waits for a validation: " + error.what());
    }
  return pending;
}

void Validator::begin(const std::shared_ptr<const ValidationContext>& context, int index) {
  job_.reset();
  job_.emplace(context, path_of(index));
}

void Validator::keep_others_waiting() const {
  comm::keep_alive(resolved_->world(), resolved_->options.validation.timeout + end_allowance);
}

Validator::Decision Validator::decide(bool at_the_end) const {
  if (job_->is_over()) return Decision::finished;
  if (job_->elapsed() >= resolved_->options.validation.timeout) return Decision::timed_out;
  if (!at_the_end) return Decision::keep_running;
  const auto left = resolved_->launch.time_left();
  return (left ? *left < time_reserve : resolved_->launch.stop_requested()) ? Decision::out_of_time
                                                                            : Decision::keep_running;
}

bool Validator::may_begin(bool asked_to_stop) const {
  const auto left = resolved_->launch.time_left();
  if (!left) return !asked_to_stop && !resolved_->launch.stop_requested();
  return *left > slowest_ + time_reserve && (!asked_to_stop || slowest_ > Clock::duration{});
}

ValidationResult Validator::write_result(const PendingValidation& of, Decision decision) {
  const auto path = path_of(of.index);
  const auto name = path.filename().string();
  ValidationResult found{.of = of};
  if (decision == Decision::out_of_time) {
    found.warning = name + " is not validated yet; started again, the run does it";
    return found;
  }
  const auto& timeout = resolved_->options.validation.timeout;
  try {
    Json fields = Json::object();
    auto status = CheckpointStatus::validated;
    if (decision == Decision::finished && !job_->outcome().error) {
      fields = job_->outcome().metrics;
      slowest_ = std::max(slowest_, job_->elapsed());
    } else {
      const bool timed_out = job_->elapsed() >= timeout;
      status = timed_out ? CheckpointStatus::validation_timeout : CheckpointStatus::validation_failed;
      found.warning = "validating " + name + ": ";
      if (decision == Decision::finished)
        found.warning += job_->outcome().error->what();
      else
        found.warning += "given up after " + std::to_string(timeout.count()) +
                         " ms (ValidationConfig::timeout); its ranks validate nothing more in this job";
      fields = earlier_names_as_null(*tier_of(run_->path()), checkpoint::read_manifest(path).metrics);
    }
    fields[checkpoint::status_name] = checkpoint::text_of(status);
    checkpoint::write_validation(path, fields);
    found.fields = std::move(fields);
  } catch (const std::exception& error) {
    found.warning += (found.warning.empty() ? "" : ". And ") +
                     ("what the validation of " + name + " has found is not kept: ") + error.what();
  }
  return found;
}

}  // namespace muster::detail::session
