#include "session/validation.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "base/option_json.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "checkpoint/retention.hpp"
#include "checkpoint/rollbacks.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/on_ranks.hpp"
#include "comm/rank_status.hpp"
#include "comm/wait.hpp"
#include "muster/validation.hpp"
#include "observe/observers.hpp"
#include "storage/tier.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>

namespace muster {

Metrics ValidationFunction::to_metrics(const Config& values) {
  if (!values.is_object())
    throw Error(ExitCode::user_error, "validating a checkpoint", "the function's return value is not a JSON object",
                "Give names and values, as {{\"val_loss\", 0.1}}");
  Metrics metrics;
  for (const auto& [name, value] : values.items()) metrics.emplace(name, value);
  return metrics;
}

template <>
constexpr bool detail::option_json::is_data<ValidationFunction> = false;
MUSTER_OPTIONS(ValidationConfig, function, timeout)

}  // namespace muster

namespace muster::detail::session {

using namespace std::chrono_literals;
using Decision = Validator::Decision;

namespace {

/// How long the leader waits before it looks again for a requested checkpoint, which may still be being written.
constexpr auto look_interval = 100ms;

}  // namespace

Validation::Validation(std::shared_ptr<const run::ResolvedOptions> resolved, std::shared_ptr<const run::RunFolder> run,
                       at::Device device)
    : validator_(std::move(resolved), std::move(run), device) {
  const auto& all = validator_.resolved();
  const bool some_do_not_train = all.worker_count < all.world().size();
  if (!is_configured() || !some_do_not_train || !comm::threads_may_call_mpi()) return;
  mailbox_.emplace(all.world());
  const auto group = all.world().split(all.is_worker() ? 0 : 1);
  if (!all.is_worker()) context_ = validator_.make_context(group);
}

void Validation::resume(const UpdateRow& update_row, const std::vector<checkpoint::Rollback>& rollbacks) {
  const UpdateRow settle = [&](std::int64_t iteration, const Json& fields) {
    settle_row(iteration, fields, update_row);
  };
  for (const auto& [index, iteration] : validator_.pending(settle, rollbacks))
    request(Checkpoint::from_directory(validator_.path_of(index)), iteration);
}

void Validation::request(const Checkpoint& checkpoint, std::int64_t training_iteration) {
  const auto index = storage::Tier::index_of(checkpoint.path().filename());
  if (!index || !mailbox_) return;
  {
    const std::lock_guard lock(rows_mutex_);
    waiting_rows_.insert(training_iteration);
  }
  mailbox_->send(leader(), json_text(Json{{"validate", *index}, {"training_iteration", training_iteration}}));
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

void Validation::accept(const ValidationResult& result, const UpdateRow& update_row) {
  if (results_.contains(result.of.index)) return;
  if (!result.warning.empty()) log::warn(result.warning);
  if (result.fields.is_null()) return;
  results_.emplace(result.of.index, result);
  warn_of_missing_score(result);
  settle_row(result.of.training_iteration, result.fields, update_row);
}

void Validation::warn_of_missing_score(const ValidationResult& result) {
  const auto& attribute = validator_.resolved().options.run_config.checkpoint_config.checkpoint_score_attribute;
  if (attribute.empty() || has_warned_of_score_ ||
      checkpoint::status_from(result.fields) != CheckpointStatus::validated)
    return;
  const auto path = validator_.path_of(result.of.index);
  try {
    const auto metrics = checkpoint::with_validation(path, checkpoint::read_manifest(path).metrics);
    const auto score = metrics.find(attribute);
    if (score != metrics.end() && (score->is_number() || score->is_null())) return;  // JSON stores NaN as null
  } catch (const Error&) {
    return;  // the next resume handles a damaged checkpoint
  }
  has_warned_of_score_ = true;
  log::warn("keeping the best checkpoints by \"" + attribute + "\": neither the report nor the validation of " +
            path.filename().string() +
            " has it as a number. Such checkpoints are all kept while none has it, and then count as the worst");
}

void Validation::training_has_ended() {
  if (mailbox_) mailbox_->send(leader(), json_text(Json{{"end", attempt_}}));
}

void Validation::serve() {
  if (!context_) return;
  const auto& world = validator_.resolved().world();
  is_ending_ = false;
  const auto is_served = [&] {
    while (const auto text = mailbox_->receive()) handle(json_from_text(*text));
    if (is_leader()) lead();
    return is_ending_ && !validator_.is_running();
  };
  comm::wait_until(is_served, Validator::as_long_as_it_takes, [&] { comm::throw_if_alarm_raised(world); });
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
    // A stuck rank cannot take part. Then the others end the validation by its timeout.
    if (!validator_.is_stuck()) validator_.begin(context_, message.at("begin"));
  } else if (message.contains("leave")) {
    validator_.leave();
    validator_.set_stuck(validator_.is_stuck() || message.at("leave").get<bool>());
  } else if (message.at("end") == attempt_) {
    is_ending_ = true;
    // The workers have ended the attempt and wait for this validation, perhaps for longer than the launch's timeout.
    if (validator_.is_running()) validator_.keep_others_waiting();
  }
}

void Validation::send_to_followers(const Json& message) {
  for (int rank = leader() + 1; rank < validator_.resolved().world().size(); ++rank)
    mailbox_->send(rank, json_text(message));
}

void Validation::lead() {
  if (validator_.is_running()) {
    const auto decision = validator_.decide(is_ending_);
    if (decision == Decision::keep_running) return;
    end_validation(decision);
    comm::keep_alive(validator_.resolved().world(), 0ms);
  }
  if (is_ending_)
    send_to_followers({{"end", attempt_}});
  else
    begin_next();
}

void Validation::end_validation(Decision decision) {
  const auto found = validator_.write_result(*std::exchange(current_, std::nullopt), decision);
  validator_.set_stuck(decision != Decision::finished || validator_.is_out_of_step());
  send_to_followers({{"leave", validator_.is_stuck()}});
  validator_.leave();
  mailbox_->send(0, found.to_text());
  if (!found.fields.is_null()) results_[found.of.index] = found;
}

void Validation::begin_next() {
  using Clock = Validator::Clock;
  if (validator_.is_stuck() || queue_.empty() || Clock::now() - last_look_ < look_interval ||
      !validator_.may_begin(false))
    return;
  last_look_ = Clock::now();
  for (const auto& [index, of] : queue_) {
    if (std::error_code ignored; !std::filesystem::exists(validator_.path_of(index), ignored))
      continue;  // not written yet, or lost
    send_to_followers({{"begin", index}});
    validator_.begin(context_, index);
    current_ = of;
    queue_.erase(index);
    return;
  }
}

Json Validation::broadcast_results() {
  Json known = Json::array();
  if (!mailbox_) return known;
  if (context_) {
    if (is_leader() && validator_.is_running())
      end_validation(validator_.is_over() ? Decision::finished : Decision::out_of_time);
    for (const auto& [index, found] : results_) known.push_back(found.to_text());
  }
  const auto text = json_text(Json{known, validator_.slowest().count(), validator_.is_stuck()});
  const auto from_leader = json_from_text(validator_.resolved().world().broadcast(text, leader()));
  validator_.note_slowest(Validator::Clock::duration(from_leader[1].get<Validator::Clock::rep>()));
  if (context_) {
    validator_.set_stuck(from_leader[2]);
    validator_.leave();
  }
  return from_leader[0];
}

Json Validation::begin_finish(bool stopped, const std::optional<Error>& error, bool prunes, UpdateRow& update_row) {
  // The leader sends its results, since rank 0's node may not see a validation.json yet that the leader's node has just
  // written.
  const auto known = broadcast_results();
  return comm::run_on_root(validator_.resolved().world(), [&] {
    const auto& options = validator_.resolved().options;
    update_row = observe::rows_after_training(validator_.run().path(), options.run_config, options.train_loop_config);
    poll_results(update_row);
    for (const auto& text : known) accept(ValidationResult::from_text(text.get<std::string>()), update_row);
    Json left = pending(update_row);
    if ((error && !stopped) || !validator_.may_begin(stopped)) left.clear();
    if (left.empty() && prunes) prune();
    return left;
  });
}

Json Validation::pending(const UpdateRow& update_row) {
  Json left = Json::array();
  for (const auto& of : validator_.pending(update_row, checkpoint::read_rollbacks(validator_.run().path())))
    if (!results_.contains(of.index)) left.push_back({of.index, of.training_iteration});
  return left;
}

void Validation::prune() const {
  checkpoint::prune(*storage::tier_of(validator_.run().path()),
                    validator_.resolved().options.run_config.checkpoint_config,
                    /*keep_pending=*/true);
}

void Validation::validate_on(const Communicator& group, const std::shared_ptr<const ValidationContext>& all,
                             const PendingValidation& of, const UpdateRow& update_row) {
  const auto& world = validator_.resolved().world();
  const bool first = world.rank() == 0;
  validator_.keep_others_waiting();
  validator_.begin(all, of.index);
  auto decision = Decision::keep_running;
  if (first)
    comm::wait_until([&] { return (decision = validator_.decide(true)) != Decision::keep_running; },
                     Validator::as_long_as_it_takes, [&] { comm::throw_if_alarm_raised(world); });
  // The first rank decides when the validation ends. Another rank may have waited for it too long and be out of step.
  const bool given_up = first && decision != Decision::finished;
  validator_.set_stuck(group.all_reduce(std::int64_t{given_up || validator_.is_out_of_step()}, ReduceOp::max) != 0);
  is_out_of_time_ = decision == Decision::out_of_time;
  if (first) accept(validator_.write_result(of, decision), update_row);
  validator_.leave();
  validator_.set_stuck(group.all_reduce(std::int64_t{validator_.is_stuck()}, ReduceOp::max) != 0);
}

std::optional<Error> Validation::finish(const std::optional<Error>& error, bool has_trained) {
  if (!is_configured()) return {};
  const auto& world = validator_.resolved().world();
  const bool stopped = error && error->code() == ExitCode::stopped;
  // A start that has not trained only prunes after validations, since their checkpoints were kept for them.
  const bool prunes = has_trained && (!error || stopped);
  UpdateRow update_row;  // set on rank 0
  const auto left = begin_finish(stopped, error, prunes, update_row);
  if (!left.empty()) validate_together(left, stopped, prunes || !error, update_row);
  const auto [still_left, all_began, is_stuck] = comm::run_on_root(world, [&] {
    const bool may_go_on = validator_.may_begin(stopped) && !validator_.is_stuck();
    const auto is_lost = [&](const Json& of) { return !results_.contains(of[0].get<int>()); };
    const auto count = may_go_on ? static_cast<std::size_t>(std::count_if(left.begin(), left.end(), is_lost))
                                 : pending([](std::int64_t, const Json&) {}).size();
    return std::tuple(count, may_go_on, validator_.is_stuck() && !is_out_of_time_);
  });
  if (still_left == 0) return {};
  const auto& remedy = validator_.run().how_to_go_on();
  if (all_began)
    return Error(ExitCode::retry, "validating", "the results of some validations could not be written",
                 "Mend the cause, which the warnings above name. " + remedy);
  const auto& launch = validator_.resolved().launch;
  const auto left_time = launch.time_left();
  const bool is_asked = launch.stop_requested() && !(left_time && left_time->count() <= 0);
  const bool by_request = world.all_reduce(std::int64_t{is_asked}, ReduceOp::max) != 0;
  if (!has_trained && !by_request && left.size() <= still_left)
    return Error(ExitCode::retry, "validating", "no validation has ended in the time that this start had",
                 "Give it more time. " + remedy);
  return Error(ExitCode::stopped, "validating",
               is_stuck ? "a validation was given up; training is done, and some checkpoints are not validated yet"
                        : "stopped; training is done, and some checkpoints are not validated yet",
               remedy);
}

void Validation::validate_together(const Json& left, bool stopped, bool prunes, const UpdateRow& update_row) {
  const auto& world = validator_.resolved().world();
  const auto group = world.split(validator_.is_stuck() ? 1 : 0);
  if (validator_.is_stuck()) return;
  const auto all = validator_.make_context(group);
  for (const auto& entry : left) {
    if (!comm::run_on_root(group, [&] { return validator_.may_begin(stopped); })) break;
    validate_on(group, all, {entry[0].get<int>(), entry[1].get<std::int64_t>()}, update_row);
    if (validator_.is_stuck()) break;
  }
  comm::keep_alive(world, 0ms);
  if (world.rank() == 0 && prunes) prune();
}

}  // namespace muster::detail::session
