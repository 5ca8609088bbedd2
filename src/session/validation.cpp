#include "session/validation.hpp"

#include "base/json.hpp"
#include "checkpoint/retention.hpp"
#include "checkpoint/rollbacks.hpp"
#include "comm/agreement.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/on_ranks.hpp"
#include "comm/rank_status.hpp"
#include "comm/wait.hpp"
#include "observe/history.hpp"
#include "observe/tensorboard.hpp"
#include "storage/tier.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>
#include <tuple>
#include <utility>

namespace muster::detail::session {

using namespace std::chrono_literals;
using Decision = Validator::Decision;

Validation::Validation(std::shared_ptr<const run::ResolvedOptions> resolved, std::shared_ptr<const run::RunFolder> run,
                       at::Device device)
    : validator_(std::move(resolved), std::move(run), device) {
  const auto& all = validator_.resolved();
  const bool some_do_not_train = all.worker_count < all.world().size();
  if (is_configured() && some_do_not_train && comm::threads_may_call_mpi()) {
    leader_ = all.worker_count;
    mailbox_.emplace(all.world());
    const auto group = all.world().split(all.is_worker() ? 0 : 1);
    if (!all.is_worker()) server_.emplace(validator_, *mailbox_, group, leader_);
  }
  requests_.emplace(validator_, mailbox_ ? &*mailbox_ : nullptr, leader_);
}

void Validation::training_has_ended() {
  if (mailbox_) mailbox_->send(leader_, json_text(Json{{"end", attempt_}}));
}

void Validation::serve() {
  if (server_) server_->serve(attempt_);
}

Json Validation::share_results() {
  Json known = Json::array();
  if (!mailbox_) return known;
  if (server_) {
    server_->end_current();
    for (const auto& [index, found] : server_->results()) known.push_back(found.to_text());
  }
  const auto text = json_text(Json{known, validator_.slowest().count(), validator_.is_stuck()});
  const auto from_leader = json_from_text(validator_.resolved().world().broadcast(text, leader_));
  validator_.note_slowest(Validator::Clock::duration(from_leader[1].get<Validator::Clock::rep>()));
  if (server_) {
    validator_.set_stuck(from_leader[2]);
    validator_.leave();
  }
  return from_leader[0];
}

Json Validation::begin_finish(bool stopped, const std::optional<Error>& error, bool prunes) {
  // Results are exchanged, since a file that another node has just written may not be visible here yet.
  const auto known = share_results();
  return comm::run_on_root(validator_.resolved().world(), [&] {
    update_row_ = rows_after_training();
    requests_->poll_results(update_row_);
    for (const auto& text : known) requests_->accept(ValidationResult::from_text(text.get<std::string>()), update_row_);
    Json left = pending(update_row_);
    if ((error && !stopped) || !validator_.may_begin(stopped)) left.clear();
    if (left.empty() && prunes) prune();
    return left;
  });
}

UpdateRow Validation::rows_after_training() const {
  const auto& folder = validator_.run().path();
  const auto& options = validator_.resolved().options;
  const auto history = std::make_shared<observe::History>(observe::History::load(folder));
  std::shared_ptr<observe::Observer> tensorboard;
  if (options.run_config.tensorboard) {
    tensorboard = observe::make_tensorboard(folder, options.train_loop_config);
    observe::AttemptStart after_all;
    for (const auto& row : observe::History::read(folder)) {
      after_all.training_iteration = row.value("training_iteration", std::int64_t{0});
      after_all.global_step = row.value("global_step", std::int64_t{0});
    }
    tensorboard->start(after_all);
  }
  return [history, tensorboard](std::int64_t iteration, const Json& fields) {
    if (history->add_validation(iteration, fields) && tensorboard) tensorboard->validated(iteration, fields);
  };
}

Json Validation::pending(const UpdateRow& update_row) {
  Json left = Json::array();
  for (const auto& of : validator_.pending(update_row, checkpoint::read_rollbacks(validator_.run().path())))
    if (!requests_->has_accepted(of.index)) left.push_back({of.index, of.training_iteration});
  return left;
}

void Validation::prune() const {
  checkpoint::prune(*storage::tier_of(validator_.run().path()),
                    validator_.resolved().options.run_config.checkpoint_config,
                    /*keep_pending=*/true);
}

void Validation::validate_on(const Communicator& group, const std::shared_ptr<const ValidationContext>& all,
                             const PendingValidation& of) {
  const auto& world = validator_.resolved().world();
  const bool first = world.rank() == 0;
  validator_.keep_others_waiting();
  validator_.begin(all, of.index);
  auto decision = Decision::keep_running;
  if (first)
    comm::wait_until([&] { return (decision = validator_.decide(true)) != Decision::keep_running; },
                     Validator::as_long_as_it_takes, [&] { comm::throw_if_alarm_raised(world); });
  // The first rank decides. Another rank may have waited too long for it, and is out of step.
  const bool given_up = first && decision != Decision::finished;
  validator_.set_stuck(group.all_reduce(std::int64_t{given_up || validator_.is_out_of_step()}, ReduceOp::max) != 0);
  is_out_of_time_ = decision == Decision::out_of_time;
  if (first) requests_->accept(validator_.write_result(of, decision), update_row_);
  validator_.leave();
  validator_.set_stuck(group.all_reduce(std::int64_t{validator_.is_stuck()}, ReduceOp::max) != 0);
}

std::optional<Error> Validation::finish(const std::optional<Error>& error, bool has_trained) {
  if (!is_configured()) return {};
  const auto& world = validator_.resolved().world();
  const bool stopped = error && error->code() == ExitCode::stopped;
  // A start that does not train, or was refused, removes no checkpoint, but those that waited for a validation.
  const bool prunes = has_trained && (!error || stopped);
  const auto left = begin_finish(stopped, error, prunes);
  if (!left.empty()) validate_together(left, stopped, prunes || !error);
  const auto [still_left, all_began, is_stuck] = comm::run_on_root(world, [&] {
    const bool may_go_on = validator_.may_begin(stopped) && !validator_.is_stuck();
    const auto is_lost = [&](const Json& of) { return !requests_->has_accepted(of[0].get<int>()); };
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

void Validation::validate_together(const Json& left, bool stopped, bool prunes) {
  const auto& world = validator_.resolved().world();
  const auto group = world.split(validator_.is_stuck() ? 1 : 0);
  if (validator_.is_stuck()) return;
  const auto all = validator_.make_context(group);
  for (const auto& entry : left) {
    if (!comm::run_on_root(group, [&] { return validator_.may_begin(stopped); })) break;
    validate_on(group, all, {entry[0].get<int>(), entry[1].get<std::int64_t>()});
    if (validator_.is_stuck()) break;
  }
  comm::keep_alive(world, 0ms);
  if (world.rank() == 0 && prunes) prune();
}

}  // namespace muster::detail::session
