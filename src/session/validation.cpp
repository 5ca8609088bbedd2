#include "session/validation.hpp"

#include "base/log.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "checkpoint/retention.hpp"
#include "checkpoint/rollbacks.hpp"
#include "comm/agreement.hpp"
#include "comm/on_ranks.hpp"
#include "comm/rank_status.hpp"
#include "comm/wait.hpp"
#include "comm/world.hpp"
#include "observe/history.hpp"
#include "storage/tier.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace muster::detail::session {
namespace {

using namespace std::chrono_literals;
using storage::Tier;

/// Ranks that do not train wait without a limit.
constexpr std::chrono::hours as_long_as_it_takes{24 * 365};
/// Time that is kept for the run's end after the last validation.
constexpr auto time_reserve = 1s;
/// Added to a validation's time-out: time to notice that it was given up, and to write the result.
constexpr auto end_allowance = 30s;
/// How often the leader looks for a checkpoint that is still being written.
constexpr auto look_interval = 100ms;

/// Null for each metric that an earlier validation of this run has given, except those that were reported.
Json earlier_names_as_null(const Tier& tier, const Json& reported) {
  Json nulls = Json::object();
  for (const auto& [index, path] : tier.list().published)
    if (const auto fields = checkpoint::read_validation(path))
      for (const auto& [name, value] : fields->items())
        if (!reported.contains(name)) nulls[name] = nullptr;
  return nulls;
}

}  // namespace

std::string Validation::ValidationResult::to_text() const {
  return Json{
      {"index", of.index}, {"training_iteration", of.training_iteration}, {"fields", fields}, {"warning", warning}}
      .dump(-1, ' ', false, Json::error_handler_t::replace);
}

Validation::ValidationResult Validation::ValidationResult::from_text(const std::string& text) {
  const auto json = Json::parse(text);
  return {.of = {json.at("index").get<int>(), json.at("training_iteration").get<std::int64_t>()},
          .fields = json.at("fields"),
          .warning = json.at("warning").get<std::string>()};
}

Validation::Validation(std::shared_ptr<const run::ResolvedOptions> resolved, std::shared_ptr<const run::RunFolder> run,
                       at::Device device)
    : resolved_(std::move(resolved)), run_(std::move(run)), device_(device) {
  const auto& world = resolved_->world();
  if (!is_configured() || resolved_->worker_count == world.size() || !comm::threads_may_call_mpi()) return;
  leader_ = resolved_->worker_count;
  mailbox_.emplace(world);
  const auto group = world.split(resolved_->is_worker() ? 0 : 1);
  if (!resolved_->is_worker()) context_ = make_context(group);
}

std::shared_ptr<const ValidationContext> Validation::make_context(const Communicator& ranks) const {
  const auto own_world = comm::make_separate_world(ranks);
  if (comm::threads_may_call_mpi()) comm::set_time_limit(own_world, resolved_->options.validation.timeout);
  return std::make_shared<ValidationContext>(ValidationContext{resolved_, run_, device_, own_world});
}

std::filesystem::path Validation::path_of(int index) const { return Tier(run_->path()).published(index); }

std::vector<Validation::Pending> Validation::pending(const UpdateRow& update_row,
                                                     const std::vector<checkpoint::Rollback>& rollbacks) const {
  std::vector<Pending> pending;
  for (const auto& [index, path] : Tier(run_->path()).list().published) try {
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

void Validation::resume(const UpdateRow& update_row, const std::vector<checkpoint::Rollback>& rollbacks) {
  const UpdateRow settle = [&](std::int64_t iteration, const Json& fields) {
    settle_row(iteration, fields, update_row);
  };
  for (const auto& [index, iteration] : pending(settle, rollbacks))
    request(Checkpoint::from_directory(path_of(index)), iteration);
}

void Validation::request(const Checkpoint& checkpoint, std::int64_t training_iteration) {
  const auto index = Tier::index_of(checkpoint.path().filename());
  if (!index || !mailbox_) return;
  {
    const std::lock_guard lock(rows_mutex_);
    waiting_rows_.insert(training_iteration);
  }
  mailbox_->send(leader_, Json{{"validate", *index}, {"training_iteration", training_iteration}}.dump());
}

bool Validation::awaits_result(std::int64_t training_iteration) const {
  const std::lock_guard lock(rows_mutex_);
  return waiting_rows_.contains(training_iteration);
}

void Validation::settle_row(std::int64_t training_iteration, const Json& fields, const UpdateRow& update_row) {
  update_row(training_iteration, fields);
  const std::lock_guard lock(rows_mutex_);
  waiting_rows_.erase(training_iteration);
}

void Validation::poll_results(const UpdateRow& update_row) {
  if (!mailbox_) return;
  while (const auto text = mailbox_->receive()) accept(ValidationResult::from_text(*text), update_row);
}

void Validation::accept(const ValidationResult& found, const UpdateRow& update_row) {
  if (accepted_.contains(found.of.index)) return;
  if (!found.warning.empty()) log::warn(found.warning);
  if (found.fields.is_null()) return;
  accepted_.insert(found.of.index);
  settle_row(found.of.training_iteration, found.fields, update_row);
}

void Validation::training_has_ended() {
  if (mailbox_) mailbox_->send(leader_, Json{{"end", attempt_}}.dump());
}

void Validation::serve() {
  if (!context_) return;
  const auto& world = resolved_->world();
  ending_ = false;
  const auto served = [&] {
    while (const auto text = mailbox_->receive()) handle(Json::parse(*text));
    if (is_leader()) lead();
    return ending_ && !job_;
  };
  comm::wait_until(served, as_long_as_it_takes, [&] { comm::throw_if_alarm_raised(world); });
}

void Validation::handle(const Json& message) {
  if (message.contains("validate")) {
    const int index = message.at("validate");
    const std::int64_t iteration = message.at("training_iteration");
    if (const auto known = results_.find(index); known != results_.end())
      mailbox_->send(0, known->second.to_text());
    else if (!current_ || current_->index != index)
      queue_[index] = {index, iteration};
  } else if (message.contains("begin")) {
    job_.reset();
    job_.emplace(context_, path_of(message.at("begin")));
  } else if (message.contains("leave")) {
    job_.reset();
    stuck_ = stuck_ || message.at("leave").get<bool>();
  } else if (message.at("end") == attempt_) {
    ending_ = true;
    // From here on the workers wait for this validation.
    if (job_) comm::keep_alive(resolved_->world(), resolved_->options.validation.timeout + end_allowance);
  }
}

void Validation::send_to_followers(const Json& message) {
  for (int rank = leader_ + 1; rank < resolved_->world().size(); ++rank) mailbox_->send(rank, message.dump());
}

void Validation::lead() {
  if (job_) {
    const auto decision = decide(ending_);
    if (decision == Decision::keep_running) return;
    end_job(decision);
    comm::keep_alive(resolved_->world(), 0ms);
  }
  if (ending_)
    send_to_followers({{"end", attempt_}});
  else
    begin_next();
}

void Validation::end_job(Decision decision) {
  const auto found = write_result(*std::exchange(current_, std::nullopt), decision);
  stuck_ = decision != Decision::finished || !job_->outcome().is_in_step;
  send_to_followers({{"leave", stuck_}});
  job_.reset();
  mailbox_->send(0, found.to_text());
  if (!found.fields.is_null()) results_[found.of.index] = found;
}

void Validation::begin_next() {
  if (stuck_ || queue_.empty() || Clock::now() - last_look_ < look_interval || !may_begin(false)) return;
  last_look_ = Clock::now();
  for (const auto& [index, of] : queue_) {
    if (std::error_code ignored; !std::filesystem::exists(path_of(index), ignored))
      continue;  // not written yet, or lost
    send_to_followers({{"begin", index}});
    job_.emplace(context_, path_of(index));
    current_ = of;
    queue_.erase(index);
    return;
  }
}

Validation::Decision Validation::decide(bool at_the_end) const {
  if (job_->is_over()) return Decision::finished;
  if (job_->elapsed() >= resolved_->options.validation.timeout) return Decision::timed_out;
  if (!at_the_end) return Decision::keep_running;
  const auto left = resolved_->launch.time_left();
  return (left ? *left < time_reserve : resolved_->launch.stop_requested()) ? Decision::out_of_time
                                                                            : Decision::keep_running;
}

bool Validation::may_begin(bool asked_to_stop) const {
  const auto left = resolved_->launch.time_left();
  if (!left) return !asked_to_stop && !resolved_->launch.stop_requested();
  return *left > slowest_ + time_reserve && (!asked_to_stop || slowest_ > Clock::duration{});
}

Validation::ValidationResult Validation::write_result(const Pending& of, Decision decision) {
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
      fields = earlier_names_as_null(Tier(run_->path()), checkpoint::read_manifest(path).metrics);
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

Json Validation::begin_finish(bool stopped, const std::optional<Error>& error, bool prunes) {
  // Results are exchanged, since a file that another node has just written may not be visible here yet.
  Json known = Json::array();
  if (mailbox_) {
    if (is_leader() && job_) end_job(job_->is_over() ? Decision::finished : Decision::out_of_time);
    for (const auto& [index, found] : results_) known.push_back(found.to_text());
    const auto from_leader =
        Json::parse(resolved_->world().broadcast(Json{known, slowest_.count(), stuck_}.dump(), leader_));
    known = from_leader[0];
    slowest_ = std::max(slowest_, Clock::duration(from_leader[1].get<Clock::rep>()));
    if (context_) {
      stuck_ = from_leader[2];
      job_.reset();
    }
  }
  return comm::run_on_root(resolved_->world(), [&] {
    auto history = observe::History::load(run_->path());
    const UpdateRow update_row = [&](std::int64_t iteration, const Json& fields) {
      history.validated(iteration, fields);
    };
    poll_results(update_row);
    for (const auto& text : known) accept(ValidationResult::from_text(text.get<std::string>()), update_row);
    Json left = Json::array();
    for (const auto& of : pending(update_row, checkpoint::read_rollbacks(run_->path())))
      if (!accepted_.contains(of.index)) left.push_back({of.index, of.training_iteration});
    if ((error && !stopped) || !may_begin(stopped)) left.clear();
    if (left.empty() && prunes) checkpoint::prune(Tier(run_->path()), resolved_->options.run_config.checkpoint_config);
    return left;
  });
}

void Validation::finish(const std::optional<Error>& error, bool has_trained) {
  if (!is_configured()) return;
  const auto& world = resolved_->world();
  const bool first = world.rank() == 0;
  const bool stopped = error && error->code() == ExitCode::stopped;
  // A start that does not train, or was refused, removes no checkpoint.
  const bool prunes = has_trained && (!error || stopped);
  const auto left = begin_finish(stopped, error, prunes);
  if (left.empty()) return;
  const auto group = world.split(stuck_ ? 1 : 0);
  if (stuck_) return;
  const auto all = make_context(group);
  for (const auto& entry : left) {
    if (!comm::run_on_root(group, [&] { return may_begin(stopped); })) break;
    comm::keep_alive(world, resolved_->options.validation.timeout + end_allowance);
    const Pending of{entry[0].get<int>(), entry[1].get<std::int64_t>()};
    job_.emplace(all, path_of(of.index));
    auto decision = Decision::keep_running;
    if (first)
      comm::wait_until([&] { return (decision = decide(true)) != Decision::keep_running; }, as_long_as_it_takes,
                       [&] { comm::throw_if_alarm_raised(world); });
    // The first rank decides. Another rank may have waited too long for it, and is out of step.
    const bool given_up = first && decision != Decision::finished,
               out_of_step = job_->is_over() && !job_->outcome().is_in_step;
    stuck_ = group.all_reduce(std::int64_t{given_up || out_of_step}, ReduceOp::max) != 0;
    if (first) {
      auto history = observe::History::load(run_->path());
      accept(write_result(of, decision),
             [&](std::int64_t iteration, const Json& fields) { history.validated(iteration, fields); });
    }
    job_.reset();
    if (stuck_) break;
  }
  comm::keep_alive(world, 0ms);
  if (first && prunes) checkpoint::prune(Tier(run_->path()), resolved_->options.run_config.checkpoint_config);
}

}  // namespace muster::detail::session
